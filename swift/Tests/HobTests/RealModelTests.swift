import Foundation
import Hob
import HobTesting
import Testing

/// The small real models that `cargo xtask models` brings; HOB_MODELS names their folder.
enum RealModels {
    static let folder = ProcessInfo.processInfo.environment["HOB_MODELS"]
    static let reranker = ProcessInfo.processInfo.environment["HOB_RERANKER"]

    static func path(_ name: String) throws -> String {
        try #require(folder) + "/" + name
    }
}

extension HobSuite {
    @Suite(.enabled(if: RealModels.folder != nil, "HOB_MODELS names no models")) struct Real {
        private func engine() async throws -> Engine {
            try await Engine.open(EngineOptions(budgetBytes: 8 << 30))
        }

        @Test func aSessionKnowsParis() async throws {
            try await leavingNothing {
                let engine = try await engine()
                let model = try RealModels.path("smollm2-135m-instruct.gguf")
                #expect(try await engine.capabilities(model).contains(.generate))
                let session = Session(engine: engine, model: model)
                let answer = try await session.respond(to: "What is the capital of France?", options: .init(maxTokens: 32))
                #expect(answer.content.contains("Paris") && answer.summary.finish == .stop)
                let decision = try await engine.decide(
                    "What is the capital of France?", among: ["The capital of France is Paris.", "Blue bicycle seven."], model: model)
                #expect(decision.best == 0 && decision.answers[0].probability > 0.9)
                let score = try await engine.score(" Paris", after: .raw("The capital of France is"), model: model)
                #expect(score.meanNegativeLogLikelihood < 3)
                #expect(try await engine.close())
            }
        }

        @Test func vectorsAreThoseOfSentenceTransformers() async throws {
            struct Reference: Decodable {
                struct Item: Decodable {
                    var text: String
                    var vector: [Float]
                }
                var items: [Item]
            }
            try await leavingNothing {
                let file = repository("tests/golden/real/minilm.json")
                // The short ones: a toolchain's root has no fast linear algebra, and Rust's tests compare them all.
                let items = try JSONDecoder().decode(Reference.self, from: Data(contentsOf: file)).items.filter { $0.text.utf8.count < 80 }
                let engine = try await engine()
                let vectors = try await engine.embed(items.map(\.text), model: try RealModels.path("all-minilm-l6-v2"))
                #expect(items.count > 3 && vectors.dimensions == 384 && vectors.count == items.count)
                for (vector, item) in zip(vectors, items) {
                    let cosine = try #require(vector.cosine(Embedding(item.vector)))
                    #expect(cosine > 0.9999)
                }
            }
        }

        @Test(.enabled(if: RealModels.reranker != nil, "HOB_RERANKER names no reranker")) func aRerankerFindsTheAnswer() async throws {
            try await leavingNothing {
                let engine = try await engine()
                let documents = ["Bread is made of flour.", "Paris is the capital of France.", "Berlin is a city."]
                let ranking = try await engine.rerank(
                    "What is the capital of France?", documents: documents, model: try #require(RealModels.reranker))
                #expect(ranking.results.first?.index == 1 && ranking.scoreKind == .normalized)
            }
        }
    }
}
