import Foundation
import Hob
import HobTesting
import Testing

/// A pool of the host's own and what its closures did.
struct HostPool: Sendable {
    let pool: Pool
    let log = Log()

    init(budget: Int = 100, idle: IdleResidencyPolicy = .default, clock: FakeClock? = nil) throws {
        let options = PoolOptions(budgetBytes: budget, idle: idle)
        pool = if let clock { try Pool(options, clock: clock) } else { try Pool(options) }
    }

    static func key(_ id: String) -> ResidentKey { ResidentKey(kind: "coreml", id: id) }

    @discardableResult
    func admit(_ id: String, _ bytes: Int = 10, _ options: AdmissionOptions = AdmissionOptions()) async throws -> Admitted {
        try await pool.admit(
            Self.key(id), cost: .bytes(bytes), options: options,
            load: { [log] context in
                context.report(0.5)
                log.add("load \(id)")
                return nil
            },
            release: { [log] _ in log.add("release \(id)") })
    }

    /// What is resident.
    func keys() throws -> [String] {
        try pool.status().entries.filter { $0.state == .ready }.map(\.key.id)
    }

    final class Log: @unchecked Sendable {
        private let lock = NSLock()
        private var entries: [String] = []
        func add(_ entry: String) { lock.withLock { entries.append(entry) } }
        var lines: [String] { lock.withLock { entries } }
    }
}

extension HobSuite {
    @Suite struct HostResidents {
        @Test func admitUseEvict() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let events = try host.pool.events()
                let admitted = try await host.admit("a", 60, .init(inUse: true))
                #expect(admitted.origin == .loaded && admitted.lease?.token == admitted.token)
                #expect(try await host.admit("a").origin == .hit)
                let lease = try #require(try host.pool.beginUse(HostPool.key("a")))
                #expect(try host.pool.beginUse(HostPool.key("b")) == nil)
                #expect(try host.pool.status()[HostPool.key("a")]?.uses == 2)
                #expect(await kind { try await host.pool.evict(HostPool.key("a")) } == .inUse)
                #expect(host.pool.endUse(lease) && !host.pool.endUse(lease), "a use ends once")
                #expect(admitted.lease?.end() == true && admitted.lease?.isDetached == true)
                #expect(try await host.pool.evict(HostPool.key("a")) == 60)
                #expect(host.log.lines == ["load a", "release a"])
                #expect(await kind { try await host.pool.evict(HostPool.key("a")) } == .notFound)
                try await host.pool.close()
                var names: [String] = []
                for try await event in events {
                    switch event {
                    case .loadStarted(let key, let token, let bytes):
                        #expect(key == HostPool.key("a") && token == admitted.token && bytes == 60)
                        names.append("started")
                    case .loadProgress(_, _, let percent): names.append("\(percent)")
                    case .loaded: names.append("loaded")
                    case .unloaded(_, _, let reason, let bytes): names.append("\(reason) \(bytes)")
                    case .closed: names.append("closed")
                    default: break
                    }
                }
                #expect(names == ["started", "50", "loaded", "requested 60", "closed"], "and the sequence ends with the pool")
            }
        }

        @Test func roomIsMadeOrWaitedForOrRefused() async throws {
            try await leavingNothing {
                let host = try HostPool()
                try await host.admit("a", 60)
                let b = try await host.admit("b", 60, .init(inUse: true))
                #expect(host.log.lines == ["load a", "release a", "load b"], "a went before b was loaded")
                #expect(try host.pool.plan(HostPool.key("c"), bytes: 60).verdict == .waits)
                #expect(try host.pool.plan(HostPool.key("c"), bytes: 40).verdict == .fits)
                #expect(await kind { try await host.admit("c", 60, .init(noRoom: .refuse)) } == .budgetExceeded)
                var timed = AdmissionOptions()
                timed.timeout = .milliseconds(5)
                #expect(await kind { [timed] in try await host.admit("c", 60, timed) } == .timeout)
                async let c = host.admit("c", 60)
                #expect(await happens { try host.pool.status().waiting == 1 })
                b.lease?.end()
                #expect(try await c.origin == .loaded)
                #expect(try host.keys() == ["c"])
                #expect(try !host.pool.hasRoom(bytes: 101) && host.pool.hasRoom(bytes: 100))
                try host.pool.pin(HostPool.key("c"))
                #expect(try await !host.pool.makeRoom(bytes: 100).fits, "pinned")
                try host.pool.unpin(HostPool.key("c"))
                let made = try await host.pool.makeRoom(bytes: 100)
                #expect(made.fits && made.evicted == [HostPool.key("c")] && made.freedBytes == 60)
            }
        }

        @Test func aThrowingClosureIsAnErrorWithItsCauseAndThePoolGoesOn() async throws {
            try await leavingNothing {
                let (host, key) = (try HostPool(), HostPool.key("a"))
                for fails in ["estimate", "load"] {
                    do {
                        _ = try await host.pool.admit(
                            key, cost: .estimated { if fails == "estimate" { throw Whoops() } else { 10 } },
                            load: { _ in throw Whoops() }, release: { _ in })
                        Issue.record("the \(fails) threw")
                    } catch let error as HobError {
                        #expect(error.kind == .callback && error.underlying as? Whoops == Whoops() && error.message.contains("Whoops"))
                    }
                    #expect(try host.pool.status().usedBytes == 0 && host.pool.status().entries.isEmpty)
                }
                _ = try await host.pool.admit(key, cost: .bytes(10), load: { _ in nil }, release: { _ in throw Whoops() })
                #expect(await kind { try await host.pool.evict(key) } == .callback)
                #expect(try host.pool.status().entries.isEmpty && host.pool.status().counters.failedReleases == 1)
                #expect(await kind { _ = try await host.pool.admit(key, cost: .bytes(-1), load: { _ in nil }, release: { _ in }) } == .invalidArgument)
                let negative = await kind { _ = try await host.pool.admit(key, cost: .bytes(1), load: { _ in -5 }, release: { _ in }) }
                #expect(negative == .callback)
                #expect(try await host.admit("a").origin == .loaded)
            }
        }

        @Test func costIsEstimatedOnceAndMeasuredAfterTheLoad() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let asked = HostPool.Log()
                let key = HostPool.key("a")
                for origin in [Admitted.Origin.loaded, .hit] {
                    let admitted = try await host.pool.admit(
                        key, cost: .estimated { asked.add("cost"); return 50 }, load: { _ in 40 }, release: { _ in })
                    #expect(admitted.origin == origin)
                }
                #expect(asked.lines.count == 1)
                let entry = try #require(try host.pool.status()[key])
                #expect(entry.estimatedBytes == 50 && entry.measuredBytes == 40 && entry.bytes == 40)
                #expect(try host.pool.setMeasured(token: entry.token, bytes: 45))
                #expect(try host.pool.status().usedBytes == 45)
                let charge = try host.pool.charge(bytes: 20)
                #expect(try host.pool.status().externalBytes == 20)
                try charge.set(bytes: 30)
                #expect(try host.pool.status().usedBytes == 75)
                charge.end()
                #expect(try host.pool.status().usedBytes == 45)
                #expect(try host.pool.forget(key) == 45 && host.pool.forget(key) == nil)
            }
        }

        /// Whoever waits is cancelled at once; the load, which nobody waits for any more, is asked to end.
        @Test func aCancelledTaskCancelsTheLoadNobodyElseWaitsFor() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let (started, ended) = (AsyncStream<Void>.makeStream(), AsyncStream<Bool>.makeStream())
                let task = Task {
                    try await host.pool.admit(
                        HostPool.key("a"), cost: .bytes(10),
                        load: { _ in
                            started.continuation.finish()
                            do { try await Task.sleep(for: .seconds(3600)) } catch {
                                ended.continuation.yield(error is CancellationError)
                                throw error
                            }
                            return nil
                        }, release: { _ in })
                }
                for await _ in started.stream {}
                #expect(try host.pool.status()[HostPool.key("a")]?.state == .loading)
                task.cancel()
                #expect(await isCancelled { _ = try await task.value })
                for await cancelled in ended.stream {
                    #expect(cancelled)
                    break
                }
                #expect(await happens { try host.pool.status().usedBytes == 0 })
            }
        }

        @Test func joinersShareOneLoad() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let origins = try await withThrowingTaskGroup(of: Admitted.Origin.self) { group in
                    for _ in 0..<50 { group.addTask { try await host.admit("a").origin } }
                    return try await group.reduce(into: []) { $0.append($1) }
                }
                #expect(origins.filter { $0 == .loaded }.count == 1)
                #expect(host.log.lines == ["load a"])
            }
        }

        @Test func pauseHoldsLoadsBackAndResumeLetsThemGo() async throws {
            try await leavingNothing {
                let host = try HostPool()
                try await host.admit("a")
                var pause: Pause? = try await host.pool.pause()
                #expect(try host.pool.status().paused)
                #expect(try await host.admit("a").origin == .hit, "residents stay usable")
                async let b = host.admit("b")
                #expect(await happens { try host.pool.status().waiting == 1 })
                #expect(pause?.resume() == true && pause?.resume() == false)
                #expect(try await b.origin == .loaded)
                pause = try await host.pool.pause()
                pause = nil
                #expect(try !host.pool.status().paused, "letting go resumes")
            }
        }

        @Test func closuresAndWhatTheyHoldGoWithTheEntry() async throws {
            try await leavingNothing {
                let host = try HostPool()
                final class Model: Sendable {}
                var model: Model? = Model()
                weak var gone = model
                _ = try await host.pool.admit(
                    HostPool.key("a"), cost: .bytes(1), load: { _ in nil }, release: { [model] _ in withExtendedLifetime(model) {} })
                model = nil
                #expect(gone != nil)
                try await host.pool.evict(HostPool.key("a"))
                #expect(await happens { gone == nil })
            }
        }

        @Test func aReaderOfEventsEndsWithItsTaskAndHearsWhatItMissed() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let few = try host.pool.events(capacity: 1)
                try host.pool.setBudget(bytes: 50)
                try host.pool.setBudget(bytes: 60)
                var iterator = few.makeAsyncIterator()
                #expect(try await iterator.next() == .missed(1))
                #expect(try await iterator.next() == .budgetChanged(bytes: 60))
                let task = Task { try await few.reduce(into: 0) { count, _ in count += 1 } }
                task.cancel()
                #expect(try await task.value == 0)
                #expect(await kind { try host.pool.setBudget(bytes: 0) } == .invalidArgument)
                #expect(try host.pool.budgetBytes == 60)
            }
        }

        @Test func handlesMayGoInAnyOrder() async throws {
            try await leavingNothing {
                var host: HostPool? = try HostPool()
                let admitted = try await #require(host).admit("a", 10, .init(inUse: true))
                let log = try #require(host).log
                host = nil
                #expect(await happens { log.lines == ["load a", "release a"] }, "the pool closed when its last handle went")
                #expect(admitted.lease?.isDetached == true && admitted.lease?.end() == true)
            }
        }
    }
}
