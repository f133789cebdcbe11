import CHob
import Foundation
import Hob
import HobTesting
import Testing

/// What a demanding host does wrong, or nearly so: it gets an error, never a trap, a hang or a blocked thread.
extension HobSuite {
    @Suite struct Misuse {
        // MARK: Numbers and texts

        @Test func hugeAndNegativeNumbersAreErrorsOrTheMost() async throws {
            try await leavingNothing {
                let (host, key) = (try HostPool(), HostPool.key("a"))
                let charges = try (0..<4).map { _ in try host.pool.charge(bytes: .max) }
                let status = try host.pool.status()
                #expect(status.externalBytes == .max && status.usedBytes == .max && status.freeBytes == 0, "sums end at the largest number")
                #expect(try !host.pool.hasRoom(bytes: .max) && host.pool.plan(key, bytes: .max).requiredBytes == .max)
                charges.forEach { $0.end() }
                try host.pool.setBudget(bytes: .max)
                #expect(try host.pool.budgetBytes == .max && host.pool.hasRoom(bytes: .max))
                try await host.admit("a", .max)
                try await host.admit("b", .max, .init(noRoom: .loadAnyway))
                #expect(try await host.pool.makeRoom(bytes: .max).fits)
                #expect(try await host.pool.trim().fits)
                #expect(try host.pool.accelerateIdle(grace: .seconds(Int64.max)) == 0 && host.pool.forget(token: .max) == nil)
                #expect(try !host.pool.setMeasured(token: .max, bytes: .max))
                _ = try host.pool.events(capacity: 0)
                _ = try host.pool.events(capacity: Int(UInt32.max))
                _ = try CancelToken().child(timeout: .seconds(Int64.max))
                for bad in [
                    { _ = try host.pool.charge(bytes: -1) }, { try host.pool.setBudget(bytes: .min) }, { _ = try host.pool.hasRoom(bytes: -1) },
                    { _ = try host.pool.plan(key, bytes: -1) }, { _ = try host.pool.events(capacity: -1) },
                    { _ = try host.pool.events(capacity: .max) }, { _ = try host.pool.accelerateIdle(grace: .seconds(-1)) },
                    { _ = try await host.pool.makeRoom(bytes: .min) }, { _ = try host.pool.setMeasured(token: 0, bytes: -1) },
                    { _ = try Pool(PoolOptions(budgetBytes: -1)) },
                    {
                        var options = PoolOptions(budgetBytes: 1)
                        options.settle = .seconds(-1)
                        _ = try Pool(options)
                    },
                    {
                        var options = AdmissionOptions()
                        options.timeout = .seconds(-1)
                        try await host.admit("c", 1, options)
                    },
                ] as [() async throws -> Void] {
                    #expect(await kind(bad) == .invalidArgument)
                }
            }
        }

        @Test func requestsOfAnySizeAreRefusedOrServed() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                var options = GenerationOptions(maxTokens: .max, sampling: .init(topK: Int(UInt32.max), seed: .max))
                options.chunkTokens = .max
                options.chunkInterval = .seconds(Int64.max)
                #expect(try await text(engine.generate("Hi", model: "chat", options: options)) == "Hello!")
                for change in [
                    { $0.sampling.topP = .nan }, { $0.sampling.minP = .infinity }, { $0.sampling.repetitionPenalty = .nan },
                    { $0.sampling.temperature = .infinity }, { $0.sampling.topK = .max }, { $0.sampling.repetitionWindow = .min },
                    { $0.maxTokens = .min }, { $0.logprobs = .max }, { $0.chunkTokens = -1 }, { $0.chunkInterval = .seconds(-1) },
                    { $0.request.timeout = .seconds(Int64.max) },
                ] as [(inout GenerationOptions) -> Void] {
                    var options = GenerationOptions()
                    change(&options)
                    #expect(await kind { [options] in _ = try engine.generate("Hi", model: "chat", options: options) } == .invalidArgument)
                }
                #expect(await kind { _ = try await engine.embed("a", model: "embedder", options: .init(dimensions: .max)) } == .invalidArgument)
                #expect(await kind { _ = try await engine.embed("a", model: "embedder", options: .init(dimensions: 0)) } == .invalidArgument)
                let top = RankingOptions(top: .max)
                #expect(try await engine.rerank("a", documents: ["b"], model: "reranker", options: top).results.count == 1)
                #expect(await kind { _ = try await engine.generate(.tokens([.max]), model: "chat").collect() } == .invalidArgument)
            }
        }

        @Test func emptyInputsHaveDefinedAnswers() async throws {
            try await leavingNothing {
                let engine = try await Rig().engine
                for bad in [
                    { _ = try engine.generate(.raw(""), model: "chat") }, { _ = try engine.generate(.tokens([]), model: "chat") },
                    { _ = try await engine.embed("", model: "embedder") }, { _ = try await engine.rerank("a", documents: [], model: "reranker") },
                    { _ = try await engine.rerank("a", documents: [""], model: "reranker") },
                    { _ = try await engine.decide("a", among: [""], model: "chat") },
                    { _ = try await engine.generate("a", model: "chat", options: .init(stop: [""])).collect() },
                    { _ = try engine.pool.peek(ResidentKey(kind: "", id: "")) ?? { throw HobError(.invalidArgument, "absent") }() },
                ] as [() async throws -> Void] {
                    #expect(await kind(bad) == .invalidArgument)
                }
                for nowhere in [
                    { _ = try await engine.generate("a", model: "").collect() }, { try await engine.load("") },
                    { _ = try await engine.inspect("") }, { _ = try await engine.tokenizer("") },
                ] as [() async throws -> Void] {
                    #expect(await kind(nowhere) == .notFound)
                }
                #expect(try await text(engine.generate("", model: "chat")) == "Hello!")
                let session = Session(engine: engine, model: "chat", instructions: "")
                #expect(try await session.respond(to: "").content == "Hello!" && session.transcript.count == 3)
                #expect(try await session.respond(to: [Session.ToolOutput]()).content == "Hello!")
                let none = Embedding([])
                #expect(none.cosine(none) == 0 && none.dot(none) == 0 && none.vector.isEmpty && Array(none) == [])
            }
        }

        @Test func textsMayHoldAnything() async throws {
            try await leavingNothing {
                let device = try FakeDevice([{ var model = FakeModel("chat", .chat); model.echo = true; return model }(), FakeModel("e", .embedder)])
                let engine = try await device.openEngine()
                for odd in ["a\0b", "\0", "\u{FFFD}\u{10FFFF}", "e\u{301}", "👩‍👩‍👧", "\u{202E}x", String(repeating: "\0", count: 1000)] {
                    let answer = try await text(engine.generate(.chat([.user(odd)]), model: "chat"))
                    #expect(answer.unicodeScalars.elementsEqual("user: \(odd)\nassistant: ".unicodeScalars), "unchanged to the scalar")
                    #expect(try await engine.embed([odd, "x"], model: "e").count == 2)
                }
                for name in ["a\0b", "\0", "chat\0", "../\0", "owner/na\0me"] {
                    let ends: [HobError.Kind?] = [.notFound, .invalidArgument]
                    let end = await kind { try await engine.load(name) }
                    #expect(ends.contains(end), "not the model before the NUL")
                }
                let (host, key) = (try HostPool(), ResidentKey(kind: "coreml", id: "a\0b"))
                _ = try await host.pool.admit(key, cost: .bytes(1), load: { _ in nil }, release: { _ in })
                #expect(try host.pool.status()[key]?.state == .ready && host.pool.peek(HostPool.key("a")) == nil)
            }
        }

        @Test func keysWithoutAKindOrWithAColonAreRefused() async throws {
            try await leavingNothing {
                let host = try HostPool()
                for key in [ResidentKey(kind: "", id: "a"), ResidentKey(kind: "a:b", id: "c"), ResidentKey(kind: "a", id: "")] {
                    #expect(await kind { _ = try await host.pool.admit(key, cost: .bytes(1), load: { _ in nil }, release: { _ in }) } == .invalidArgument)
                    #expect(try host.pool.beginUse(key) == nil && !host.pool.pin(key) && host.pool.forget(key) == nil)
                }
                let colons = ResidentKey(kind: "a", id: "b:c:d")
                _ = try await host.pool.admit(colons, cost: .bytes(1), load: { _ in nil }, release: { _ in })
                #expect(try host.pool.status().entries.map(\.key) == [colons])
            }
        }

        @Test func numbersThatAreNoneStayWhereTheyAre() throws {
            let (odd, one) = (Embedding([.nan, 1]), Embedding([1, 1]))
            #expect(odd.cosine(one)?.isNaN == true && one.cosine(odd)?.isNaN == true)
            #expect(Embedding([.infinity, 1]).cosine(one)?.isNaN == true)
            let large = Embedding([3e38, 3e38])
            #expect(try #require(large.cosine(one)) > 0.9999 && large.cosine(Embedding([-3e38, -3e38])) == -1, "squares beyond a Float")
            #expect(try #require(Embedding([1e-30, 1e-30]).cosine(one)) > 0.9999)
        }

        /// A settings file of any content is a policy. The same texts have the same meaning in Rust, in C and in JavaScript.
        @Test(arguments: [
            (#"{"mode":"after_seconds","seconds":1e999}"#, IdleResidencyPolicy.default), (#"{"mode":"after_seconds","seconds":true}"#, .default),
            (#"{"mode":"after_seconds","seconds":[60]}"#, .default), (#"{"mode":"after_seconds","seconds":-0.5}"#, .default),
            (#"{"mode":"after_seconds","seconds":0.9}"#, .immediately), (#"{"mode":"after_seconds","seconds":-0.0}"#, .immediately),
            (#"{"mode":"after_seconds","seconds":18446744073709551615}"#, .afterSeconds(86_400)),
            (#"{"mode":"after_seconds","seconds":99999999999999999999999}"#, .afterSeconds(86_400)),
            (#"{"mode":"Never"}"#, .default), (#"{"mode":"never\u0000"}"#, .default), (#"{"mode":["never"]}"#, .default), ("true", .default),
            (#"{"mode":"never","unknown":{"a":[1]}}"#, .never), (#"{"Mode":"never"}"#, .default),
        ])
        func anySettingIsAPolicy(json: String, expected: IdleResidencyPolicy) throws {
            #expect(try JSONDecoder().decode(IdleResidencyPolicy.self, from: Data(json.utf8)) == expected)
        }

        @Test func anyPolicyIsClampedWhereverItGoes() async throws {
            try await leavingNothing {
                let host = try HostPool()
                for (given, expected) in [
                    (IdleResidencyPolicy.afterSeconds(.max), IdleResidencyPolicy.afterSeconds(86_400)), (.afterSeconds(.min), .afterSeconds(30)),
                    (.afterSeconds(0), .immediately),
                ] {
                    try await host.admit("a", 1, .init(idle: given))
                    #expect(try host.pool.status()[HostPool.key("a")]?.idle == expected)
                    try host.pool.setDefaultIdle(given)
                    try await host.pool.evict(HostPool.key("a"))
                }
            }
        }

        // MARK: Threads

        /// The device is stuck in a load all the while: whoever waited for it here would wait for ever.
        @Test @MainActor func nothingBlocksTheMainActor() async throws {
            try await leavingNothing {
                let device = try FakeDevice([FakeModel("chat", .chat), FakeModel("long", .chat, reply: Rig.long)])
                var engine: Engine? = try await device.openEngine()
                try device.hold(.load)
                let stream = try #require(engine).generate("Hi", model: "chat")
                try await device.waitUntilHeld(.load)
                let pool = try #require(engine).pool
                #expect(engine?.availability == .working && engine?.requests == 1)
                _ = try engine?.device
                #expect(try pool.status()[chatKey]?.state == .loading && pool.beginUse(chatKey) == nil && pool.peek(chatKey) == nil)
                _ = try (pool.plan(chatKey, bytes: 5), pool.hasRoom(bytes: 5), pool.pin(chatKey), pool.unpin(chatKey), pool.touch(chatKey))
                try pool.setBudget(bytes: 1 << 20)
                try pool.setDefaultIdle(.never)
                let charge = try pool.charge(bytes: 5)
                charge.end()
                let events = try pool.events()
                let second = try #require(engine).generate("Hi", model: "long")
                second.stop()
                stream.cancel()
                let session = Session(engine: try #require(engine), model: "long")
                let warming = session.prewarm()
                // The main actor does other things while its calls wait.
                let waiting = Task { @MainActor [engine] in await kind { _ = try await engine?.embed("a", model: "chat") } }
                await Task { @MainActor in }.value
                warming.cancel()
                waiting.cancel()
                engine = nil
                try device.release(.load)
                _ = await (warming.result, waiting.value)
                withExtendedLifetime(events) {}
            }
        }

        /// Every sequence is read from the main actor under Swift 6, and so are closures made there.
        @Test @MainActor func sequencesAreReadFromTheMainActor() async throws {
            try await leavingNothing {
                let view = View()
                let rig = try await Rig()
                for try await event in try rig.engine.generate("Hi", model: "chat") {
                    if case .chunk(let chunk) = event { view.text += chunk.text }
                }
                for try await snapshot in Session(engine: rig.engine, model: "chat").streamResponse(to: "Hi") { view.text += snapshot.delta }
                #expect(view.text == "Hello!Hello!")
                let pool = try Pool(PoolOptions(budgetBytes: 10))
                let events = try pool.events()
                let admitted = try await pool.admit(
                    HostPool.key("a"), cost: .estimated { await view.cost() },
                    load: { context in
                        await view.add("load")
                        return nil
                    },
                    release: { _ in await view.add("release") })
                #expect(admitted.origin == .loaded)
                try await rig.engine.load("other", progress: { fraction in Task { @MainActor in view.progress = fraction } })
                try await pool.close()
                for try await _ in events { view.events += 1 }
                #expect(view.text == "Hello!Hello!costloadrelease" && view.events > 3)
                #expect(await happens { view.progress == 1 })
            }
        }

        @Test func enginesComeAndGoInManyTasks() async throws {
            try await leavingNothing {
                try await withThrowingTaskGroup(of: Void.self) { group in
                    for index in 0..<24 {
                        group.addTask {
                            let engine = try await FakeDevice([FakeModel("chat", .chat), FakeModel("long", .chat, reply: Rig.long)]).openEngine()
                            let stream = try engine.generate("Hi", model: "long")
                            switch index % 4 {
                            case 0: #expect(try await text(stream) == Rig.long)
                            case 1: for try await _ in stream { break }
                            case 2: try await engine.close()
                            default: break
                            }
                        }
                    }
                    try await group.waitForAll()
                }
            }
        }

        /// Tasks cancelled after any number of steps, each on its way somewhere else.
        @Test func tasksAreCancelledAnywhere() async throws {
            try await leavingNothing {
                let rig = try await Rig(budget: 250, queue: 500)
                let tasks = (0..<120).map { index in
                    Task { [engine = rig.engine] in
                        switch index % 6 {
                        case 0: _ = try await engine.embed("a", model: "embedder")
                        case 1: _ = try await engine.rerank("a", documents: ["b"], model: "reranker")
                        case 2: _ = try await engine.decide("a", among: ["b", "c"], model: "chat")
                        case 3: _ = try await Session(engine: engine, model: "other").respond(to: "Hi")
                        case 4: try await engine.load("chat")
                        default: _ = try await text(engine.generate("Hi", model: "long"))
                        }
                    }
                }
                for (index, task) in tasks.enumerated() {
                    for _ in 0..<(index % 7) { await Task.yield() }
                    task.cancel()
                }
                for task in tasks {
                    if case .failure(let error) = await task.result { #expect(error is CancellationError, "\(error)") }
                }
                #expect(await happens { rig.engine.requests == 0 })
                #expect(try rig.engine.pool.status().entries.allSatisfy { $0.uses == 0 })
                #expect(try await text(rig.engine.generate("Hi", model: "chat")) == "Hello!")
            }
        }

        // MARK: Streams

        @Test func aStreamThatIsOverSaysSo() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let stream = try rig.engine.generate("Hi", model: "chat")
                #expect(try await text(stream) == "Hello!")
                #expect(await kind { _ = try await stream.collect() } == .closed, "it is the host's doing, not a fault inside")
                stream.stop()
                stream.cancel()
                var iterator = stream.makeAsyncIterator()
                #expect(try await iterator.next() == nil)
                let failing = try rig.engine.generate("Hi", model: "nowhere")
                #expect(await kind { _ = try await failing.collect() } == .notFound)
                var after = failing.makeAsyncIterator()
                #expect(try await after.next() == nil)
            }
        }

        @Test func aLoopMayEndItsOwnStream() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                for stops in [true, false] {
                    let stream = try rig.engine.generate("Hi", model: "long")
                    var summary: Summary?
                    let end = await kind {
                        for try await event in stream {
                            if case .finished(let last) = event { summary = last }
                            if stops { stream.stop() } else { stream.cancel() }
                        }
                    }
                    #expect(stops ? end == nil && summary?.finish == .cancelled : end == .cancelled && summary == nil)
                }
            }
        }

        @Test func aCancelledTaskThatWantsWhatThereIsGetsIt() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.hold(.step)
                let session = Session(engine: rig.engine, model: "long")
                let options = GenerationOptions(request: .init(stopsOnCancel: true))
                let task = Task { try await session.respond(to: "Hi", options: options) }
                try await rig.device.waitUntilHeld(.step)
                try rig.device.pass(.step)
                try await rig.device.waitUntilHeld(.step)
                task.cancel()
                try rig.device.release(.step)
                let answer = try await task.value
                #expect(answer.summary.finish == .cancelled && Rig.long.hasPrefix(answer.content) && answer.content.count < Rig.long.count)
                #expect(session.transcript.map(\.role) == [.user, .assistant] && session.transcript[1].content == answer.content)
            }
        }

        // MARK: Sessions

        @Test func ofManyTurnsAtOnceOneIsTaken() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "chat")
                try rig.device.hold(.step)
                let first = Task { try await session.respond(to: "first") }
                try await rig.device.waitUntilHeld(.step)
                let ends = await withTaskGroup(of: HobError.Kind?.self) { group in
                    for _ in 0..<50 { group.addTask { await kind { _ = try await session.respond(to: "another") } } }
                    return await group.reduce(into: []) { $0.append($1) }
                }
                #expect(ends.count == 50 && ends.allSatisfy { $0 == .busy })
                #expect(session.isResponding && session.transcript.isEmpty)
                try rig.device.release(.step)
                #expect(try await first.value.content == "Hello!")
                #expect(session.transcript == [.user("first"), .assistant("Hello!")] && !session.isResponding)
            }
        }

        @Test func aTurnIsAskedOnce() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "chat")
                let turn = session.streamResponse(to: "Hi")
                #expect(!session.isResponding, "it begins with the first read")
                for try await _ in turn {}
                #expect(await kind { _ = try await turn.collect() } == .busy, "and not once more with the second")
                #expect(session.transcript.count == 2 && !session.isResponding)
                var after = session.streamResponse(to: "Hi", options: .init(maxTokens: -1)).makeAsyncIterator()
                #expect(await kind { _ = try await after.next() } == .invalidArgument)
                #expect(try await after.next() == nil, "an iterator that threw is over")
                _ = session.streamResponse(to: "never read")
                #expect(!session.isResponding)
            }
        }

        @Test func aSessionMayGoInTheMiddleOfItsTurn() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                var session: Session? = Session(engine: rig.engine, model: "long")
                var turn = try #require(session).streamResponse(to: "Hi").makeAsyncIterator()
                #expect(try await turn.next() != nil)
                session = nil
                var last: ResponseStream.Snapshot?
                while let snapshot = try await turn.next() { last = snapshot }
                #expect(last?.content == Rig.long && last?.summary != nil)
            }
        }

        @Test func prewarmingTwiceLoadsOnce() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "chat")
                try rig.device.hold(.load)
                let (first, second) = (session.prewarm(), session.prewarm())
                try await rig.device.waitUntilHeld(.load)
                second.cancel()
                #expect(await isCancelled { try await second.value })
                try rig.device.release(.load)
                try await first.value
                session.prewarm()
                #expect(try await session.respond(to: "Hi").content == "Hello!")
                #expect(try rig.device.count(.load) == 1 && !session.isResponding)
            }
        }

        // MARK: Closures

        @Test func closuresMayCallThePool() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let (a, b, pool) = (HostPool.key("a"), HostPool.key("b"), host.pool)
                try await host.admit("b", 10)
                _ = try await pool.admit(
                    a, cost: .estimated { try pool.status().entries.count == 2 ? 60 : 0 },
                    load: { context in
                        #expect(try pool.status()[a]?.state == .loading && pool.beginUse(a) == nil)
                        // Another one's load within this one, and a use.
                        try await host.admit("c", 10)
                        #expect(try pool.beginUse(b)?.end() == true)
                        context.report(.nan)
                        context.report(-.infinity)
                        context.report(2)
                        return 50
                    },
                    release: { token in
                        #expect(try pool.peek(a) == nil && pool.beginUse(a) == nil && !pool.setMeasured(token: token, bytes: 5))
                        #expect(try pool.forget(a) == nil && !pool.touch(a))
                        try await pool.evict(b)
                        try await pool.trim()
                    })
                #expect(try pool.status().usedBytes == 70)
                try await pool.evict(a)
                #expect(try host.keys() == ["c"])
            }
        }

        @Test func closuresThatNobodyWaitsForAreCancelled() async throws {
            try await leavingNothing {
                for estimates in [true, false] {
                    let host = try HostPool()
                    let (begun, log) = (AsyncStream<Void>.makeStream(), HostPool.Log())
                    @Sendable func hang() async throws {
                        begun.continuation.finish()
                        do { try await Task.sleep(for: .seconds(3600)) } catch {
                            log.add("cancelled")
                            throw error
                        }
                    }
                    let task = Task {
                        try await host.pool.admit(
                            HostPool.key("a"),
                            cost: .estimated {
                                if estimates { try await hang() }
                                return 1
                            },
                            load: { _ in
                                try await hang()
                                return nil
                            }, release: { _ in })
                    }
                    for await _ in begun.stream {}
                    if estimates { task.cancel() } else { try await host.pool.close() }
                    if case .failure(let error) = await task.result {
                        #expect(estimates ? error is CancellationError : (error as? HobError)?.kind == .closed, "\(error)")
                    } else {
                        Issue.record("it never loaded")
                    }
                    #expect(await happens { log.lines == ["cancelled"] })
                }
            }
        }

        @Test func aHostMayNotTakeThePlaceOfAModel() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let host = await kind {
                    _ = try await rig.engine.pool.admit(chatKey, cost: .bytes(5), load: { _ in nil }, release: { _ in })
                }
                #expect(host == .invalidArgument)
                #expect(try await text(rig.engine.generate("Hi", model: "chat")) == "Hello!")
            }
        }

        @Test func aReleaseThatThrowsAtCloseIsNamed() async throws {
            try await leavingNothing {
                let host = try HostPool()
                _ = try await host.pool.admit(HostPool.key("a"), cost: .bytes(1), load: { _ in nil }, release: { _ in throw Whoops() })
                #expect(await kind { try await host.pool.close() } == .callback)
                #expect(try host.pool.isClosed && host.pool.status().entries.isEmpty)
                #expect(await kind { try await host.pool.close() } == .callback, "closing again tells the same")
                #expect(await kind { try await host.admit("b") } == .closed)
            }
        }

        /// A release that does not come to its end: whoever waits for it can leave, and the closing goes on without them.
        @Test func waitingForACloseCanBeGivenUp() async throws {
            try await leavingNothing {
                let (host, gate) = (try HostPool(), AsyncStream<Void>.makeStream())
                _ = try await host.pool.admit(
                    HostPool.key("a"), cost: .bytes(1), load: { _ in nil },
                    release: { [log = host.log] _ in
                        log.add("begun")
                        for await _ in gate.stream {}
                        log.add("ended")
                    })
                let task = Task {
                    // Also in a task that is cancelled already, as in a clean-up: the closing begins all the same.
                    withUnsafeCurrentTask { $0?.cancel() }
                    try await host.pool.close()
                }
                #expect(await isCancelled { try await task.value })
                #expect(await happens { host.log.lines == ["begun"] && host.pool.isClosed })
                gate.continuation.finish()
                try await host.pool.close()
                #expect(host.log.lines == ["begun", "ended"])

                let device = try FakeDevice([FakeModel("chat", .chat)])
                let engine = try await device.openEngine()
                try await engine.load("chat")
                try device.hold(.unload)
                let closing = Task { try await engine.closeAndWait() }
                try await device.waitUntilHeld(.unload)
                closing.cancel()
                #expect(await isCancelled { try await closing.value })
                try device.release(.unload)
                #expect(try await engine.close() && device.heldBytes == 0)
            }
        }

        @Test func errorsSayInAlertsWhatTheySay() {
            let error: any Error = HobError(.busy, "too many wait")
            #expect(error.localizedDescription == "too many wait")
            #expect((error as NSError).code == -8 && (error as NSError).domain == "Hob" && "\(error)" == "Busy: too many wait")
        }

        @Test func eventsHaveOneReaderAndAnEnd() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let events = try host.pool.events()
                let first = Task { try await events.reduce(into: 0) { count, _ in count += 1 } }
                // Whichever of the two reads first, the other one is refused, and the first goes on.
                let second = Task { try await events.reduce(into: 0) { count, _ in count += 1 } }
                let ends = Ends()
                for task in [first, second] { Task { ends.add(await kind { _ = try await task.value }) } }
                #expect(await happens { ends.all.count == 1 })
                try host.pool.setBudget(bytes: 50)
                try await host.pool.close()
                #expect(await happens { ends.all.count == 2 })
                #expect(ends.all == [.busy, nil])
                var late = events.makeAsyncIterator()
                #expect(try await late.next() == nil)
                #expect(try await late.next() == nil)
            }
        }
    }
}

/// A view's state.
@MainActor private final class View {
    var text = ""
    var progress = 0.0
    var events = 0
    func add(_ more: String) { text += more }
    func cost() -> Int {
        text += "cost"
        return 5
    }
}
