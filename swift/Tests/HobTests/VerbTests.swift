import Foundation
import Hob
import HobTesting
import Testing

extension HobSuite {
    @Suite struct Verbs {
        @Test func generateStreamsAndEndsOnce() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                var (pieces, summaries) = ([String](), [Summary]())
                for try await event in try rig.engine.generate("Hi", model: "chat") {
                    switch event {
                    case .chunk(let chunk): pieces.append(chunk.text)
                    case .finished(let summary): summaries.append(summary)
                    default: Issue.record("neither a tool nor a call was asked for")
                    }
                }
                #expect(pieces.joined() == "Hello!")
                #expect(summaries.count == 1)
                let summary = try #require(summaries.first)
                #expect(summary.finish == .stop && summary.usage.completionTokens == 6 && summary.usage.promptTokens > 0)
                #expect(summary.usage.load != nil && summary.provenance?.model == "chat")
                #expect(try rig.engine.pool.status()[chatKey]?.uses == 0)
            }
        }

        @Test func optionsReachTheModel() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let short = try await rig.engine.generate("Hi", model: "chat", options: .init(maxTokens: 3)).collect()
                #expect(short.text == "Hel" && short.summary.finish == .length && short.tokenIDs.count == 3)
                let stopped = try await rig.engine.generate("Hi", model: "chat", options: .init(stop: ["xx", "lo"], logprobs: 2)).collect()
                #expect(stopped.text == "Hel" && stopped.summary.stopIndex == 1)
                #expect(!stopped.logprobs.isEmpty && stopped.logprobs.allSatisfy { $0.top.count == 2 && $0.logprob <= 0 })
                let drawn = try await rig.engine.generate(
                    .raw("Hi"), model: "chat", options: .init(maxTokens: 2, sampling: .init(temperature: 0.5, seed: 7))
                ).collect()
                #expect(drawn.summary.seed == 7)
                let tokens = try await rig.engine.generate(.tokens([72, 105]), model: "chat").collect()
                #expect(tokens.summary.usage.promptTokens == 2)
                for options in [
                    GenerationOptions(sampling: .init(temperature: -1)), GenerationOptions(sampling: .init(topK: -1)),
                    GenerationOptions(maxTokens: -1), GenerationOptions(logprobs: 101), GenerationOptions(sampling: .init(temperature: .nan)),
                    GenerationOptions(template: .init(variables: ["x": .double(.infinity)])),
                    GenerationOptions(request: .init(timeout: .seconds(-1))), GenerationOptions(request: .init(timeout: .zero)),
                ] {
                    #expect(await kind { _ = try rig.engine.generate("Hi", model: "chat", options: options) } == .invalidArgument)
                }
                #expect(await kind { _ = try rig.engine.generate(.chat([]), model: "chat") } == .invalidArgument)
            }
        }

        @Test func callsOfToolsAreEvents() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let weather = Tool(name: "weather", description: "", parameters: ["type": "object", "properties": ["city": ["type": "string"]]])
                let answer = try await rig.engine.generate("Hi", model: "calling", options: .init(template: .init(tools: [weather]))).collect()
                #expect(answer.text.contains("Let me see"))
                let call = try #require(answer.toolCalls.first)
                #expect(try call.name == "weather" && call.arguments()["city"]?.string == "Bern")
            }
        }

        @Test func embedRerankScoreDecide() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let vectors = try await rig.engine.embed(["a", "b", "a"], model: "embedder")
                #expect(vectors.count == 3 && vectors.dimensions == 8 && vectors.allSatisfy { $0.count == 8 })
                #expect(vectors[0].vector == vectors[2].vector)
                let cosine = try #require(vectors[0].cosine(vectors[2]))
                #expect(abs(cosine - 1) < 1e-5)
                #expect(vectors.usage.promptTokens > 0 && vectors.provenance.model == "embedder")
                let short = try await rig.engine.embed("a", model: "embedder", options: .init(dimensions: 4, normalize: true))
                let length = try #require(short.dot(short))
                #expect(short.count == 4 && abs(length - 1) < 1e-5)

                let documents = ["one", "two", "three"]
                let ranking = try await rig.engine.rerank("query", documents: documents, model: "reranker", options: .init(top: 2))
                #expect(ranking.results.count == 2 && ranking.scoreKind == .normalized)
                #expect(ranking.results[0].score >= ranking.results[1].score && ranking.results.allSatisfy { $0.logit != nil })
                let cosines = try await rig.engine.rerank("query", documents: documents, model: "embedder")
                #expect(cosines.scoreKind == .cosine && cosines.results.count == 3 && cosines.results[0].logit == nil)

                let score = try await rig.engine.score("Hello!", after: "Hi", model: "chat")
                #expect(score.tokenIDs.count == 6 && score.logprobs.count == 6 && score.meanNegativeLogLikelihood.isFinite)
                let choice = try await rig.engine.decide("Hi", among: ["Hello!", "Bye."], model: "chat")
                #expect(choice.best == 0 && choice.confidence != nil && abs(choice.answers.map(\.probability).reduce(0, +) - 1) < 1e-9)
                let level = try await rig.engine.decide("Hi", among: ["low", "high"], kind: .score, model: "chat")
                #expect(level.value != nil)
                let yes = try await rig.engine.decide("Hi", among: ["true", "false"], kind: .predicate, model: "chat")
                #expect(yes.confidence == nil)
            }
        }

        @Test func wrongModelsAndArgumentsAreTypedErrors() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                #expect(await kind { _ = try await engine.embed("a", model: "chat") } == .unsupported)
                #expect(await kind { _ = try await engine.rerank("a", documents: ["b"], model: "chat") } == .unsupported)
                #expect(await kind { _ = try await engine.generate("a", model: "embedder").collect() } == .unsupported)
                #expect(await kind { _ = try await engine.embed("a", model: "nowhere") } == .notFound)
                #expect(await kind { _ = try await engine.inspect("nowhere") } == .notFound)
                #expect(await kind { _ = try await engine.embed([], model: "embedder") } == .invalidArgument)
                #expect(await kind { _ = try await engine.embed("a", model: "embedder", options: .init(dimensions: -4)) } == .invalidArgument)
                #expect(await kind { _ = try await engine.rerank(" ", documents: ["b"], model: "reranker") } == .invalidArgument)
                #expect(await kind { _ = try await engine.score("", after: "Hi", model: "chat") } == .invalidArgument)
                #expect(await kind { _ = try await engine.decide("Hi", among: [], model: "chat") } == .invalidArgument)
                let options = RequestOptions(load: .init(manifestJSON: "{"))
                #expect(await kind { try await engine.load("chat", options: options) } == .invalidArgument)
                #expect(await kind { _ = try await FakeDevice([]).openEngine(.init(budgetBytes: 0)) } == .invalidArgument)
                var none = EngineOptions()
                none.capacity = 0
                #expect(await kind { [none] in _ = try await FakeDevice([]).openEngine(none) } == .invalidArgument)
            }
        }

        @Test func inspectEstimateCapabilitiesLoadNothing() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                let info = try await engine.inspect("embedder")
                #expect(info.kind == .embedder && info.family == "fake" && info.context == 4096 && info.prompts == ["query"])
                #expect(try await engine.estimate("chat").total == 100)
                #expect(try await engine.capabilities("chat") == [.generate, .score, .decide])
                #expect(try engine.pool.status().entries.isEmpty)
                #expect(try engine.device.kind == "fake")
                #expect(engine.availability == .ready && engine.requests == 0)
            }
        }

        @Test func loadReportsProgress() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                let seen = Seen()
                let info = try await engine.load("chat", progress: { seen.add($0) })
                #expect(seen.fractions == seen.fractions.sorted() && seen.fractions.last == 1)
                #expect(try engine.pool.status()[ResidentKey(info)]?.state == .ready)
                _ = try await engine.load("other", options: .init(modelIdle: .never, pinned: true))
                let other = try #require(try engine.pool.status()[ResidentKey(kind: "chat", id: "other")])
                #expect(other.pinned && other.idle == .never)
            }
        }

        @Test func faultsOfTheDeviceAreErrorsAndServiceGoesOn() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.failNext(.load)
                #expect(await kind { _ = try await text(rig.engine.generate("Hi", model: "chat")) } == .backend)
                try rig.device.failNext(.step, with: .panic)
                #expect(await kind { _ = try await text(rig.engine.generate("Hi", model: "chat")) } == .internal)
                try rig.device.failNext(.embed)
                #expect(await kind { _ = try await rig.engine.embed("a", model: "embedder") } == .backend)
                #expect(try await text(rig.engine.generate("Hi", model: "chat")) == "Hello!")
            }
        }

        @Test func useAfterCloseIsAnErrorEverywhere() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                let pool = engine.pool
                #expect(try await text(engine.generate("Hi", model: "chat")) == "Hello!")
                #expect(try await engine.close())
                #expect(try await engine.close(), "closing again is allowed")
                #expect(engine.availability == .closed)
                #expect(await kind { _ = try engine.generate("Hi", model: "chat") } == .closed)
                #expect(await kind { _ = try await engine.embed("a", model: "embedder") } == .closed)
                #expect(await kind { _ = try await engine.rerank("a", documents: ["b"], model: "reranker") } == .closed)
                #expect(await kind { _ = try await engine.score("a", after: "b", model: "chat") } == .closed)
                #expect(await kind { _ = try await engine.decide("a", among: ["b"], model: "chat") } == .closed)
                #expect(await kind { try await engine.load("chat") } == .closed)
                #expect(await kind { _ = try await engine.pause() } == .closed)
                #expect(await kind { try await pool.evict(chatKey) } == .closed)
                #expect(await kind { try await pool.trim() } == .closed)
                #expect(await kind { try pool.setBudget(bytes: 1) } == .closed)
                #expect(try pool.beginUse(chatKey) == nil)
                #expect(try pool.status().closed && pool.isClosed)
            }
        }

        @Test func anEngineLeftWithoutCloseGoesAway() async throws {
            try await leavingNothing {
                let device = try FakeDevice([FakeModel("chat", .chat)])
                var engine: Engine? = try await device.openEngine()
                weak var gone = engine
                let answer = try await engine?.generate("Hi", model: "chat").collect()
                #expect(try answer?.text == "Hello!" && device.heldBytes > 0)
                engine = nil
                #expect(gone == nil)
                #expect(await happens { try device.heldBytes == 0 }, "its models are unloaded in the background")
            }
        }

        @Test func aStreamKeepsItsEngineOpen() async throws {
            try await leavingNothing {
                let device = try FakeDevice([FakeModel("long", .chat, reply: Rig.long)])
                let stream = try await device.openEngine().generate("Hi", model: "long")
                #expect(try await text(stream) == Rig.long)
            }
        }
    }
}

/// Fractions in the order they were told.
final class Seen: @unchecked Sendable {
    private let lock = NSLock()
    private var all: [Double] = []

    func add(_ fraction: Double) {
        lock.withLock { all.append(fraction) }
    }

    var fractions: [Double] { lock.withLock { all } }
}
