import Foundation
import Hob
import HobTesting
import Testing

extension HobSuite {
    /// The ten rows of the idle policy's acceptance matrix.
    @Suite struct IdleMatrix {
        private let clock: FakeClock

        init() throws {
            clock = try FakeClock()
        }

        private func host(_ idle: IdleResidencyPolicy = .afterSeconds(60), budget: Int = 100) throws -> HostPool {
            try HostPool(budget: budget, idle: idle, clock: clock)
        }

        private func unloadIn(_ host: HostPool, _ id: String) throws -> Int? {
            try host.pool.status()[HostPool.key(id)]?.unloadInMs
        }

        /// Moves the clock and has everything done that is due by then.
        private func advance(_ host: HostPool, _ seconds: Double) async throws {
            try clock.advance(by: .seconds(seconds))
            try await host.pool.sweep()
        }

        @Test func row1TheTimerIsSetWhenTheUseEnds() async throws {
            let host = try host(.default)
            let admitted = try await host.admit("a", 10, .init(inUse: true))
            try await advance(host, 2000)
            #expect(try unloadIn(host, "a") == nil, "no countdown while in use")
            admitted.lease?.end()
            #expect(try unloadIn(host, "a") == 900_000)
            try await advance(host, 900)
            #expect(try host.keys() == ["a"], "exactly at its time it stays")
            // Without a sweep of ours: the pool's own timer.
            try clock.advance(by: .milliseconds(1))
            #expect(await happens { try host.keys().isEmpty })
        }

        @Test func row2ASecondUseStartsTheCountdownAnew() async throws {
            let host = try host()
            try await host.admit("a")
            try await advance(host, 50)
            let lease = try #require(try host.pool.beginUse(HostPool.key("a")))
            try await advance(host, 50)
            lease.end()
            try await advance(host, 60)
            #expect(try host.keys() == ["a"])
            try await advance(host, 1)
            #expect(try host.keys().isEmpty)
            #expect(await happens { try host.pool.status().counters.idleUnloads == 1 })
        }

        @Test func row3AStoppedStreamCountsFromTheEndOfItsCleanup() async throws {
            let rig = try await Rig(idle: .afterSeconds(60), clock: clock)
            try rig.device.hold(.step)
            let stop = Task { try await text(rig.engine.generate("Hi", model: "chat")) }
            try await rig.device.waitUntilHeld(.step)
            stop.cancel()
            try clock.advance(by: .seconds(1))
            #expect(try rig.engine.pool.status()[chatKey]?.unloadInMs == nil, "its use has not ended")
            try rig.device.release(.step)
            #expect(await isCancelled { _ = try await stop.value })
            #expect(await happens { try rig.engine.pool.status()[chatKey]?.unloadInMs == 60_000 })
        }

        @Test func row4ATimerThatFindsAUseDoesNothing() async throws {
            let host = try host()
            try await host.admit("a")
            let lease = try #require(try host.pool.beginUse(HostPool.key("a")))
            try await advance(host, 500)
            #expect(try host.keys() == ["a"])
            lease.end()
            try await advance(host, 59)
            #expect(try host.keys() == ["a"])
            try await advance(host, 2)
            #expect(try host.keys().isEmpty)
        }

        @Test func row5ALoadThatNeedsTheRoomWinsOverACountdown() async throws {
            let host = try host(budget: 10)
            try await host.admit("a")
            try await host.admit("b")
            #expect(try host.keys() == ["b"], "room for one is strict single-model residency")
            let counters = try host.pool.status().counters
            #expect(counters.idleUnloads == 0 && counters.evictions == 1)
        }

        @Test func row6EachModelHasItsOwnCountdown() async throws {
            let host = try host(.afterSeconds(1800))
            try await host.admit("a")
            try await advance(host, 600)
            try await host.admit("b")
            try await host.admit("c", 10, .init(idle: .afterSeconds(60)))
            try await advance(host, 61)
            #expect(try host.keys() == ["a", "b"])
            try await advance(host, 1200)
            #expect(try host.keys() == ["b"])
            try await advance(host, 601)
            #expect(try host.keys().isEmpty)
        }

        @Test func row7NeverMeansThatTimersDoNothingAndTheRestWorks() async throws {
            let host = try host(.never)
            try await host.admit("a", 60)
            try await host.admit("b", 30)
            try await advance(host, 1_000_000)
            #expect(try host.keys() == ["a", "b"] && clock.sleepers == 0)
            try await host.pool.evict(HostPool.key("b"))
            try await host.admit("c", 60)
            #expect(try host.keys() == ["c"])
        }

        @Test func row8ImmediatelyUnloadsWhenTheLastUseEnds() async throws {
            let host = try host(.immediately)
            let first = try await host.admit("a", 10, .init(inUse: true))
            let second = try #require(try host.pool.beginUse(HostPool.key("a")))
            first.lease?.end()
            try await host.pool.sweep()
            #expect(try host.keys() == ["a"])
            second.end()
            #expect(await happens { host.log.lines == ["load a", "release a"] })
            try await host.admit("ahead")
            try await advance(host, 10_000)
            #expect(try host.keys() == ["ahead"], "what is loaded ahead waits for its first use")
        }

        @Test func row9AnIdleUnloadTouchesNoFile() async throws {
            let file = FileManager.default.temporaryDirectory.appendingPathComponent("hob-\(UUID().uuidString)")
            try Data("saved".utf8).write(to: file)
            defer { try? FileManager.default.removeItem(at: file) }
            let host = try host()
            try await host.admit("a")
            try await advance(host, 61)
            #expect(try host.keys().isEmpty)
            #expect(try Data(contentsOf: file) == Data("saved".utf8))
        }

        @Test func row10CloseAndExplicitUnloadWinOverTimers() async throws {
            let host = try host()
            try await host.admit("a")
            try await host.admit("b")
            #expect(await happens { try clock.sleepers == 1 })
            try await host.pool.evict(HostPool.key("b"))
            try await host.pool.close()
            #expect(await happens { try clock.sleepers == 0 })
            try clock.advance(by: .seconds(1000))
            #expect(try host.pool.status().counters.idleUnloads == 0)
            #expect(host.log.lines.filter { $0.hasPrefix("release") } == ["release b", "release a"])
        }

        @Test func aPickerChangesTheDefaultAndAModelItsOwn() async throws {
            let host = try host(.never)
            try await host.admit("a")
            try host.pool.setDefaultIdle(.afterSeconds(300))
            #expect(try unloadIn(host, "a") == 300_000)
            #expect(try host.pool.setIdle(.never, for: HostPool.key("a")) && unloadIn(host, "a") == nil)
            #expect(try host.pool.setIdle(nil, for: HostPool.key("a")) && unloadIn(host, "a") == 300_000)
            #expect(try host.pool.accelerateIdle(grace: .seconds(5)) == 1 && unloadIn(host, "a") == 5000)
            #expect(try host.pool.touch(HostPool.key("a")) && unloadIn(host, "a") == 300_000)
        }
    }
}
