import Foundation
import Hob
import HobTesting
import Testing

extension HobSuite {
    @Suite struct Cancelling {
        /// A generation that waits at `point`, in a task of its own.
        private func held(_ rig: Rig, at point: FakeDevice.Point, model: String = "long") async throws -> Task<String, any Error> {
            try rig.device.hold(point)
            let task = Task { [engine = rig.engine] in try await text(engine.generate("Hi", model: model)) }
            try await rig.device.waitUntilHeld(point)
            return task
        }

        @Test(arguments: [FakeDevice.Point.load, .loadStep, .prefill, .step])
        func aTaskIsCancelledInEveryPhase(point: FakeDevice.Point) async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let task = try await held(rig, at: point)
                task.cancel()
                try rig.device.release(point)
                #expect(await isCancelled { _ = try await task.value })
                #expect(await happens { rig.engine.requests == 0 })
                #expect(try rig.engine.pool.status().entries.allSatisfy { $0.uses == 0 })
                #expect(try await text(rig.engine.generate("Hi", model: "chat")) == "Hello!")
            }
        }

        @Test func cancelBeforeTheFirstToken() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let stream = try rig.engine.generate("Hi", model: "chat")
                stream.cancel()
                // Nobody cancelled this task: it is the stream that was.
                #expect(await kind { _ = try await stream.collect() } == .cancelled)
                let task = Task { [engine = rig.engine] in
                    withUnsafeCurrentTask { $0?.cancel() }
                    return try await text(engine.generate("Hi", model: "chat"))
                }
                #expect(await isCancelled { _ = try await task.value })
                let embed = Task { [engine = rig.engine] in
                    withUnsafeCurrentTask { $0?.cancel() }
                    return try await engine.embed("a", model: "embedder").count
                }
                #expect(await isCancelled { _ = try await embed.value })
                #expect(try rig.engine.pool.status()[ResidentKey(kind: "embedder", id: "embedder")] == nil, "it never began")
            }
        }

        @Test func breakAfterTheFirstTokenEndsTheGeneration() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let stream = try rig.engine.generate("Hi", model: "long")
                for try await event in stream {
                    if case .chunk = event { break }
                }
                // The stream itself is still here; it is the loop that was left.
                #expect(await happens { rig.engine.requests == 0 })
                #expect(try rig.engine.pool.status()[ResidentKey(kind: "chat", id: "long")]?.uses == 0)
                #expect(await kind { _ = try await stream.collect() } == .cancelled)
            }
        }

        @Test func stopGivesWhatThereIs() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.hold(.step)
                let stream = try rig.engine.generate("Hi", model: "long")
                try await rig.device.waitUntilHeld(.step)
                stream.stop()
                try rig.device.release(.step)
                let answer = try await stream.collect()
                #expect(answer.summary.finish == .cancelled && answer.text.count < Rig.long.count)
            }
        }

        @Test func tokensAndTimeouts() async throws {
            try await leavingNothing {
                let (rig, token) = (try await Rig(), try CancelToken())
                try rig.device.hold(.embed)
                let options = RequestOptions(cancel: try token.child())
                let task = Task { [engine = rig.engine] in
                    try await engine.embed("a", model: "embedder", options: .init(request: options)).count
                }
                try await rig.device.waitUntilHeld(.embed)
                #expect(!token.isCancelled)
                token.cancel()
                try rig.device.release(.embed)
                #expect(await kind { _ = try await task.value } == .cancelled)
                #expect(token.isCancelled && options.cancel?.isCancelled == true)

                let late = try CancelToken().child(timeout: .zero)
                #expect(late.isCancelled)
                #expect(await kind { try await rig.engine.load("chat", options: .init(cancel: late)) } == .timeout)
                #expect(await kind { _ = try CancelToken().child(timeout: .seconds(-1)) } == .invalidArgument)

                try rig.device.hold(.step)
                let timed = GenerationOptions(request: .init(timeout: .milliseconds(20)))
                #expect(await kind { _ = try await text(rig.engine.generate("Hi", model: "long", options: timed)) } == .timeout)
                try rig.device.release(.step)
            }
        }

        @Test func aTaskIsCancelledWhileItWaitsForRoom() async throws {
            try await leavingNothing {
                let rig = try await Rig(budget: 150)
                let first = try await held(rig, at: .step, model: "chat")
                let second = Task { [engine = rig.engine] in try await text(engine.generate("Hi", model: "other")) }
                #expect(await happens { try rig.engine.pool.status().waiting == 1 })
                second.cancel()
                #expect(await isCancelled { _ = try await second.value })
                #expect(try rig.engine.pool.status().waiting == 0)
                try rig.device.release(.step)
                #expect(try await first.value == "Hello!", "who was in nobody's way goes on")
            }
        }

        @Test func manyTasksAtOnce() async throws {
            try await leavingNothing {
                let rig = try await Rig(queue: 500)
                let answers = try await withThrowingTaskGroup(of: String.self) { group in
                    for index in 0..<200 {
                        group.addTask { [engine = rig.engine] in
                            switch index % 4 {
                            case 0: try await engine.embed("a", model: "embedder").count.description
                            case 1: try await engine.rerank("a", documents: ["b"], model: "reranker").results.count.description
                            default: try await text(engine.generate("Hi", model: index % 4 == 2 ? "chat" : "other"))
                            }
                        }
                    }
                    return try await group.reduce(into: [String: Int]()) { $0[$1, default: 0] += 1 }
                }
                #expect(answers == ["8": 50, "1": 50, "Hello!": 50, "Other.": 50])
                #expect(rig.engine.requests == 0)
            }
        }

        @Test func oneMoreThanTheQueueHoldsIsBusy() async throws {
            try await leavingNothing {
                let rig = try await Rig(queue: 0)
                try rig.device.hold(.step)
                let streams = try (0..<8).map { _ in try rig.engine.generate("Hi", model: "chat") }
                #expect(await kind { _ = try rig.engine.generate("Hi", model: "chat") } == .busy)
                #expect(rig.engine.availability == .working && rig.engine.requests == 8)
                try rig.device.release(.step)
                for stream in streams { #expect(try await text(stream) == "Hello!") }
            }
        }

        /// Eight generations that wait for the device, on a cooperative pool of a few threads: a timer of Swift's still ticks.
        @Test func theCooperativePoolIsNeverBlocked() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.hold(.step)
                let tasks = (0..<8).map { _ in Task { [engine = rig.engine] in try await text(engine.generate("Hi", model: "chat")) } }
                try await rig.device.waitUntilHeld(.step)
                #expect(await happens { rig.engine.requests == 8 })
                let waiting = Task { [device = rig.device] in try await device.waitUntilHeld(.drain) }
                try rig.device.hold(.drain)
                let ticks = Task {
                    for _ in 0..<10 { try await Task.sleep(for: .milliseconds(10)) }
                    return rig.engine.requests
                }
                #expect(try await ticks.value == 8, "all of them still wait")
                try rig.device.release(.step)
                for task in tasks { #expect(try await task.value == "Hello!") }
                async let evicted = rig.engine.pool.evict(chatKey)
                try await waiting.value
                try rig.device.release(.drain)
                #expect(try await evicted == 100)
            }
        }

        @Test func oneReaderAtATime() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.hold(.step)
                let stream = try rig.engine.generate("Hi", model: "chat")
                try await rig.device.waitUntilHeld(.step)
                let ends = Ends()
                let readers = (0..<2).map { _ in Task { ends.add(await kind { _ = try await text(stream) }) } }
                // One of them is refused; its leaving ends the generation, for a stream has one reader.
                #expect(await happens { !ends.all.isEmpty })
                try rig.device.release(.step)
                for reader in readers { await reader.value }
                #expect(ends.all == [.busy, .cancelled])
            }
        }
    }
}

/// How tasks ended, in that order.
final class Ends: @unchecked Sendable {
    private let lock = NSLock()
    private var kinds: [HobError.Kind?] = []

    func add(_ kind: HobError.Kind?) {
        lock.withLock { kinds.append(kind) }
    }

    var all: [HobError.Kind?] { lock.withLock { kinds } }
}
