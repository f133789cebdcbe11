// The examples of the READMEs, the guide and the sources: compiled, and where they need no model of their own, run.

import CHob
import Foundation
import Hob
import HobTesting
import Testing

// MARK: README.md, swift/README.md

private func quickStart() async throws {
    let engine = try await Engine.open()
    let session = Session(engine: engine, model: "models/smollm2.gguf", instructions: "Answer in one sentence.")
    for try await snapshot in session.streamResponse(to: "What is the capital of France?") {
        print(snapshot.delta, terminator: "")
    }

    let texts = ["A cat sleeps on the sill.", "The kitten naps.", "Markets fell on Monday."]
    let vectors = try await engine.embed(texts, model: "models/all-minilm-l6-v2")
    print(vectors[0].cosine(vectors[1]) ?? 0)
}

private func rerankAndDecide(engine: Engine, reranker: String, model: String, documents: [String]) async throws {
    let ranking = try await engine.rerank("capital of France", documents: documents, model: reranker)
    for result in ranking.results { print(result.score, documents[result.index]) }

    let decision = try await engine.decide("Is water wet?", among: ["true", "false"], kind: .predicate, model: model)
    print(decision.answers[0].probability)
}

private func cApi() {
    print(String(cString: hob_version()))
}

// MARK: Session

private func session(engine: Engine, model: String) async throws {
    let session = Session(engine: engine, model: model, instructions: "Answer in one sentence.")
    let answer = try await session.respond(to: "What is the capital of France?")
    print(answer.content)
}

// MARK: The guide

private func streaming(engine: Engine, model: String) async throws {
    let stream = try engine.generate("Tell me a story.", model: model, options: GenerationOptions(maxTokens: 200))
    for try await event in stream {
        switch event {
        case .chunk(let chunk): print(chunk.text, terminator: "")
        case .toolCall(let call): print("call of", call.name)
        case .rejectedCall(let call): print("not a call:", call.message)
        case .finished(let summary): print("\n", summary.finish, summary.usage.completionTokens)
        }
    }
}

private func cancelling(engine: Engine, model: String) async throws {
    let task = Task {
        try await engine.generate("Tell me a story.", model: model).collect().text
    }
    task.cancel()
    do {
        print(try await task.value)
    } catch is CancellationError {
        print("stopped")
    }
}

private func tools(engine: Engine, model: String, temperature: @Sendable (String) async -> String) async throws {
    let weather = Tool(
        name: "weather", description: "The temperature in a city.",
        parameters: ["type": "object", "properties": ["city": ["type": "string"]], "required": ["city"]])
    let session = Session(engine: engine, model: model, tools: [weather])
    var answer = try await session.respond(to: "How warm is it in Bern?")
    while let call = answer.toolCalls.first {
        let city = try call.arguments()["city"]?.string ?? ""
        answer = try await session.respond(to: [.init(callID: call.id, content: await temperature(city))])
    }
    print(answer.content)
}

private func keeping(engine: Engine, settings: Data) throws {
    let policy = try JSONDecoder().decode(IdleResidencyPolicy.self, from: settings)
    try engine.pool.setDefaultIdle(policy)
}

private func own(engine: Engine, table: Table) async throws {
    let key = ResidentKey(kind: "coreml", id: "classifier")
    let admitted = try await engine.pool.admit(
        key, cost: .bytes(200_000_000), options: AdmissionOptions(inUse: true),
        load: { context in
            await table.load(under: context.token)
            return nil
        },
        release: { token in await table.drop(token) })
    defer { admitted.lease?.end() }
    await table.classify(admitted.token)
}

/// A host's own models, by token.
private actor Table {
    private var models: [UInt64: String] = [:]
    func load(under token: UInt64) { models[token] = "model" }
    func drop(_ token: UInt64) { models[token] = nil }
    func classify(_ token: UInt64) { precondition(models[token] != nil) }
    var isEmpty: Bool { models.isEmpty }
}

private func testing() async throws {
    let device = try FakeDevice([FakeModel("chat", .chat, reply: "Hello!")])
    let engine = try await device.openEngine()
    try device.failNext(.load)
    await #expect(throws: HobError.self) { try await engine.load("chat") }
    #expect(try await engine.generate("Hi", model: "chat").collect().text == "Hello!")
}

extension HobSuite {
    @Suite struct Snippets {
        @Test func theExamplesRun() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                try await session(engine: engine, model: "chat")
                try await streaming(engine: engine, model: "chat")
                try await cancelling(engine: engine, model: "chat")
                try await rerankAndDecide(engine: engine, reranker: "reranker", model: "chat", documents: ["a", "b"])
                try keeping(engine: engine, settings: Data(#"{"mode":"never"}"#.utf8))
                let table = Table()
                try await own(engine: engine, table: table)
                try await engine.pool.evict(ResidentKey(kind: "coreml", id: "classifier"))
                #expect(await table.isEmpty)
                try await testing()
                cApi()
            }
        }
    }
}
