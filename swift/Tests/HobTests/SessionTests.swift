import Hob
import HobTesting
import Observation
import Testing

extension HobSuite {
    @Suite struct Sessions {
        @Test func aTurnJoinsTheTranscriptWhenItIsComplete() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "chat", instructions: "Be brief.")
                #expect(session.transcript == [.system("Be brief.")])
                let answer = try await session.respond(to: "Hi")
                #expect(answer.content == "Hello!" && answer.summary.finish == .stop && !session.isResponding)
                #expect(session.transcript == [.system("Be brief."), .user("Hi"), .assistant("Hello!")])
                let next = try await session.respond(to: "More")
                #expect(next.summary.usage.promptTokens > answer.summary.usage.promptTokens, "the model sees the whole of it")
                let again = Session(engine: rig.engine, model: "chat", transcript: session.transcript)
                _ = try await again.respond(to: "More")
                #expect(again.transcript.count == 7)
            }
        }

        /// What a SwiftUI view relies on.
        @Test func viewsObserveATurn() async throws {
            try await leavingNothing {
                let (session, seen) = (Session(engine: try await Rig().engine, model: "chat"), HostPool.Log())
                withObservationTracking { _ = session.isResponding } onChange: { seen.add("responding") }
                withObservationTracking { _ = session.transcript } onChange: { seen.add("transcript") }
                _ = try await session.respond(to: "Hi")
                #expect(seen.lines == ["responding", "transcript"])
                withObservationTracking { _ = session.isResponding } onChange: { seen.add("again") }
                _ = try await session.respond(to: "Hi")
                #expect(seen.lines.last == "again" && session.transcript.count == 4)
            }
        }

        @Test func snapshotsGrowToTheWholeAnswer() async throws {
            try await leavingNothing {
                let session = Session(engine: try await Rig().engine, model: "long")
                var (deltas, last, before) = ("", "", 0)
                for try await snapshot in session.streamResponse(to: "Hi") {
                    deltas += snapshot.delta
                    last = snapshot.content
                    #expect(last.count >= before && (snapshot.summary == nil) == session.isResponding)
                    before = last.count
                }
                #expect(deltas == Rig.long && last == Rig.long)
            }
        }

        @Test func aFailedCancelledOrAbandonedTurnLeavesNoTrace() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "long")
                try rig.device.failNext(.prefill)
                #expect(await kind { _ = try await session.respond(to: "Hi") } == .backend)
                #expect(await kind { _ = try await session.respond(to: "Hi", options: .init(maxTokens: -1)) } == .invalidArgument)
                for try await _ in session.streamResponse(to: "Hi") { break }
                try rig.device.hold(.step)
                let task = Task { try await session.respond(to: "Hi") }
                try await rig.device.waitUntilHeld(.step)
                #expect(session.isResponding)
                #expect(await kind { _ = try await session.respond(to: "me too") } == .busy)
                task.cancel()
                try rig.device.release(.step)
                #expect(await isCancelled { _ = try await task.value })
                #expect(session.transcript.isEmpty && !session.isResponding)
                #expect(try await session.respond(to: "Hi").content == Rig.long)
            }
        }

        @Test func prewarmLoadsTheModel() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try await Session(engine: rig.engine, model: "chat").prewarm().value
                #expect(try rig.engine.pool.status()[chatKey]?.state == .ready)
                let missing = Session(engine: rig.engine, model: "nowhere").prewarm()
                #expect(await kind { try await missing.value } == .notFound)
            }
        }

        @Test func aToolIsCalledAndItsOutputAnswers() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "calling", tools: [Tool(name: "weather", description: "Tells the weather.")])
                let asked = try await session.respond(to: "What is the weather in Bern?")
                let call = try #require(asked.toolCalls.first)
                let answer = try await session.respond(to: [.init(callID: call.id, content: "Rain.")])
                #expect(answer.toolCalls.count == 1, "the fake says the same again")
                #expect(session.transcript.map(\.role) == [.user, .assistant, .tool, .assistant])
                #expect(session.transcript[1].toolCalls == [call] && session.transcript[2].toolCallID == call.id)
            }
        }
    }
}
