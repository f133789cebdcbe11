import Foundation
import Hob
import HobTesting
import Testing

/// All tests, one after the other: each of them must leave no handle of the library behind.
@Suite(.serialized, .timeLimit(.minutes(5)))
enum HobSuite {}

/// Runs a test's body and then waits until every handle of the library is let go of.
func leavingNothing(
    isolation: isolated (any Actor)? = #isolation, sourceLocation: SourceLocation = #_sourceLocation, _ body: () async throws -> Void
) async throws {
    try await body()
    // Tasks that answer the library may still be on their way out; nothing but yielding is needed for them to end.
    let quiet = await happens { try liveHandles().values.allSatisfy { $0 == 0 } }
    let left = try liveHandles().filter { $0.value != 0 }
    #expect(quiet, "\(left)", sourceLocation: sourceLocation)
}

/// Whether a condition comes true within a minute.
func happens(isolation: isolated (any Actor)? = #isolation, _ condition: () async throws -> Bool) async -> Bool {
    let end = ContinuousClock.now + .seconds(60)
    while ContinuousClock.now < end {
        if (try? await condition()) == true { return true }
        await Task.yield()
    }
    return false
}

func text(_ stream: GenerationStream) async throws -> String {
    try await stream.collect().text
}

/// The kind of the error that `body` throws; nil if it throws none, or one of another type.
func kind(isolation: isolated (any Actor)? = #isolation, _ body: () async throws -> Void) async -> HobError.Kind? {
    do {
        try await body()
        return nil
    } catch {
        return (error as? HobError)?.kind
    }
}

/// Whether `body` throws a `CancellationError`.
func isCancelled(isolation: isolated (any Actor)? = #isolation, _ body: () async throws -> Void) async -> Bool {
    do {
        try await body()
        return false
    } catch {
        return error is CancellationError
    }
}

/// A scripted engine with a chat model, an embedder and a reranker of 100 bytes each, and room for all of them.
struct Rig {
    let device: FakeDevice
    let engine: Engine

    static let long = String(repeating: "a long answer. ", count: 150)

    init(budget: Int = 1 << 30, idle: IdleResidencyPolicy = .default, queue: Int = 64, clock: FakeClock? = nil) async throws {
        var calling = FakeModel("calling", .chat, reply: #"Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>"#)
        calling.template = Self.toolTemplate
        device = try FakeDevice([
            FakeModel("chat", .chat), FakeModel("other", .chat, reply: "Other."), FakeModel("long", .chat, reply: Self.long),
            FakeModel("embedder", .embedder), FakeModel("reranker", .reranker), calling,
        ])
        var options = EngineOptions(budgetBytes: budget, idle: idle)
        options.promptCacheBytes = 0
        options.queue = queue
        engine = try await device.openEngine(options, clock: clock)
    }

    /// One line per message, with the marks by which calls in Hermes' form are told.
    static let toolTemplate =
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
        + #"{# <tool_call>{"name": 1, "arguments": 2}</tool_call> #}"#
}

let chatKey = ResidentKey(kind: "chat", id: "chat")

struct Whoops: Error, Equatable {}

/// A folder or file of the repository.
func repository(_ path: String) -> URL {
    let here = URL(fileURLWithPath: #filePath)
    return here.deletingLastPathComponent().appendingPathComponent("../../..").appendingPathComponent(path).standardizedFileURL
}
