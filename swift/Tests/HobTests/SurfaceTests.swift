import Foundation
import Hob
import HobTesting
import Testing

/// An engine on a scripted device that knows `model` alone.
private func open(_ model: FakeModel, limits: Limits = Limits()) async throws -> Engine {
    var options = EngineOptions()
    options.limits = limits
    return try await FakeDevice([model]).openEngine(options)
}

/// The message of the error that `body` throws, which must be of `kind`.
private func message(_ kind: HobError.Kind, _ body: () async throws -> Void) async -> String {
    do {
        try await body()
    } catch let error as HobError where error.kind == kind {
        return error.message
    } catch {
        Issue.record("\(error)")
    }
    return ""
}

/// What Swift offers is what Rust and C offer: one test for each thing beyond the everyday.
extension HobSuite {
    @Suite struct Surface {
        // MARK: Generating

        @Test func everyLimitOfARequestCanBeSet() async throws {
            try await leavingNothing {
                var limits = Limits()
                (limits.stops, limits.stopBytes, limits.timeout) = (1, 3, .seconds(5))
                let engine = try await open(FakeModel("chat", .chat), limits: limits)
                func refusal(_ options: GenerationOptions) async -> String {
                    await message(.invalidArgument) { _ = try engine.generate("Hi", model: "chat", options: options) }
                }
                #expect(await refusal(.init(stop: ["a", "b"])).contains("Limits::stops"))
                #expect(await refusal(.init(stop: ["abcd"])).contains("Limits::stop_bytes"))
                #expect(await refusal(.init(request: .init(timeout: .milliseconds(5_001)))).contains("Limits::timeout"))
                let allowed = GenerationOptions(stop: ["abc"], request: .init(timeout: .seconds(5)))
                #expect(try await text(engine.generate("Hi", model: "chat", options: allowed)) == "Hello!")
            }
        }

        @Test func aLimitThatIsNoneIsNamed() async throws {
            for (change, name) in [
                ({ $0.callBytes = -1 }, "call_bytes"), ({ $0.promptBytes = .min }, "prompt_bytes"), ({ $0.timeout = .seconds(-1) }, "timeout"),
            ] as [((inout Limits) -> Void, String)] {
                var limits = Limits()
                change(&limits)
                #expect(await message(.invalidArgument) { [limits] in _ = try await open(FakeModel("chat", .chat), limits: limits) }.contains(name))
            }
            var lifted = Limits()
            (lifted.promptBytes, lifted.totalBytes, lifted.texts, lifted.timeout) = (.max, .max, .max, .seconds(Int64.max))
            _ = try await open(FakeModel("chat", .chat), limits: lifted).close()
        }

        @Test func aCallOverTheLimitIsRejectedWithItsReason() async throws {
            try await leavingNothing {
                var limits = Limits()
                limits.callBytes = 20
                var model = FakeModel("chat", .chat, reply: #"<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>"#)
                model.template = Rig.toolTemplate
                let engine = try await open(model, limits: limits)
                let tools = TemplateOptions(tools: [Tool(name: "weather", description: "")])
                let answer = try await engine.generate("Hi", model: "chat", options: .init(template: tools)).collect()
                #expect(answer.toolCalls.isEmpty && answer.rejectedCalls.map(\.reason) == [.tooLarge])
                // A conversation shows it as well: else its answer would be an empty one, for no reason.
                let session = Session(engine: engine, model: "chat", tools: [Tool(name: "weather", description: "")])
                let turn = try await session.respond(to: "Hi")
                #expect(turn.rejectedCalls.map(\.reason) == [.tooLarge] && turn.toolCalls.isEmpty)
            }
        }

        @Test func whyACallIsRejected() async throws {
            try await leavingNothing {
                for (reply, reason) in [
                    (#"<tool_call>{"name": "weather""#, RejectedCall.Reason.incomplete), ("<tool_call>{</tool_call>", .malformed),
                    (#"<tool_call>{"arguments": {}}</tool_call>"#, .noName), (#"<tool_call>{"name": "x", "arguments": {}}</tool_call>"#, .unknownTool),
                    (#"<tool_call>{"name": "weather", "arguments": 7}</tool_call>"#, .badArguments),
                ] {
                    var model = FakeModel("chat", .chat, reply: reply)
                    model.template = Rig.toolTemplate
                    let options = GenerationOptions(template: .init(tools: [Tool(name: "weather", description: "")]))
                    let answer = try await open(model).generate("Hi", model: "chat", options: options).collect()
                    let call = try #require(answer.rejectedCalls.first)
                    #expect(call.reason == reason && reply.hasPrefix(call.text) && !call.message.isEmpty, "\(reply)")
                }
            }
        }

        /// A host that knows better than the template says how answers are marked.
        @Test func theFormatOfAnswersCanBeChosen() async throws {
            try await leavingNothing {
                let reply = #"<r>Hm.</r>Well. <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>"#
                let engine = try await open(FakeModel("chat", .chat, reply: reply))
                #expect(try await engine.tokenizer("chat").format == ChatFormat(), "its template marks nothing")
                let tools = TemplateOptions(tools: [Tool(name: "weather", description: "")])
                let plain = try await engine.generate("Hi", model: "chat", options: .init(template: tools)).collect()
                #expect(plain.text == reply && plain.toolCalls.isEmpty)
                var options = GenerationOptions(template: tools)
                options.format = ChatFormat(tools: .hermes, reasoning: .init(open: "<r>", close: "</r>"))
                let told = try await engine.generate("Hi", model: "chat", options: options).collect()
                #expect(told.reasoning == "Hm." && told.text.hasPrefix("Well.") && told.toolCalls.map(\.name) == ["weather"])
                options.format = ChatFormat(reasoning: .init(open: "", close: ""))
                let empty = await kind { [options] in _ = try await engine.generate("Hi", model: "chat", options: options).collect() }
                #expect(empty == .invalidArgument)
                for format in [ChatFormat(tools: .llama3), ChatFormat(tools: .mistral), ChatFormat(reasoning: .init(open: "a", close: "b"))] {
                    let json = try JSONEncoder().encode(format)
                    #expect(try JSONDecoder().decode(ChatFormat.self, from: json) == format)
                }
            }
        }

        @Test func aTemplateSeesNamesAndFieldsAndNoGenerationPromptWhenNotWanted() async throws {
            try await leavingNothing {
                var model = FakeModel("chat", .chat)
                model.template = "{% for m in messages %}[{{ m.name }}|{{ m.mood }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
                let tokenizer = try await open(model).tokenizer("chat")
                var message = Message(role: .user, content: "Hi", name: "Ann")
                message.fields = ["mood": "merry", "content": "not this one"]
                #expect(try await tokenizer.render([message]).text == "[Ann|merry|Hi]>")
                var template = TemplateOptions()
                template.addsGenerationPrompt = false
                #expect(try await tokenizer.render([message], template: template).text == "[Ann|merry|Hi]")
                let json = try JSONEncoder().encode([message])
                let read = try JSONDecoder().decode([Message].self, from: json)
                #expect(read[0].fields == ["mood": "merry"] && read[0].name == "Ann" && read[0].content == "Hi")
            }
        }

        @Test func messagesOfOtherAPIsAreRead() throws {
            func read(_ json: String) throws -> Message { try JSONDecoder().decode(Message.self, from: Data(json.utf8)) }
            #expect(try read(#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#).content == "ab")
            #expect(throws: DecodingError.self) { try read(#"{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}"#) }
            #expect(throws: DecodingError.self) { try read(#"{"role": "user", "content": 7}"#) }
            let call = try read(#"{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}"#)
            #expect(try call.content == nil && call.toolCalls[0].arguments()["a"] == 1)
            #expect(try read(#"{"role": "user", "content": "a", "x": null, "y": [1]}"#).fields == ["y": [1]])
        }

        @Test func aTokenizerCountsWithoutTheModel() async throws {
            try await leavingNothing {
                let device = try FakeDevice([FakeModel("chat", .chat)])
                let engine = try await device.openEngine()
                let tokenizer = try await engine.tokenizer("chat")
                #expect(try device.heldBytes == 0 && engine.pool.status().entries.isEmpty)
                #expect(try await engine.close())
                let ids = try await tokenizer.encode("Grüezi\0!")
                #expect(ids.count == "Grüezi\0!".utf8.count && tokenizer.vocabularySize > 256 && !tokenizer.eosIDs.isEmpty)
                #expect(try await tokenizer.decode(ids) == "Grüezi\0!")
                #expect(try await tokenizer.decode([.max, 72]) == "H", "what is outside the vocabulary is left out")
                #expect(try await tokenizer.encode("").isEmpty)
                #expect(try await tokenizer.decode([]).isEmpty)
                let rendered = try await tokenizer.render([.user("Hi")])
                #expect(rendered.text == "user: Hi\nassistant: " && rendered.tokenIDs.count == rendered.text.utf8.count)
                #expect(tokenizer.chatTemplate?.contains("messages") == true)
                #expect(await kind { _ = try await engine.tokenizer("nowhere") } == .notFound)
            }
        }

        @Test func scriptedFaultsHaveTheirKinds() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                try rig.device.failNext(.load, with: .outOfMemory)
                #expect(await kind { try await rig.engine.load("chat") } == .outOfMemory)
                try await rig.engine.load("chat")
                try await rig.engine.closeAndWait()
                #expect(try rig.device.heldBytes == 0 && rig.engine.availability == .closed)
            }
        }

        @Test func aTokenSaysWhy() async throws {
            try await leavingNothing {
                let token = try CancelToken()
                let late = try token.child(timeout: .zero)
                #expect(token.reason == nil && late.reason == .timeout)
                token.cancel()
                #expect(try token.reason == .cancelled && token.child().reason == .cancelled && late.reason == .timeout)
            }
        }

        // MARK: The pool

        @Test func entriesAreForgottenByTokenAndLeasesKnowTheirKeys() async throws {
            try await leavingNothing {
                let host = try HostPool()
                let (key, old) = (HostPool.key("a"), try await host.admit("a", 20))
                #expect(try host.pool.isPinned(key) == false && host.pool.isPinned(HostPool.key("b")) == nil)
                try host.pool.pin(key)
                #expect(try host.pool.isPinned(key) == true)
                let new = try await host.admit("a", 30, { var options = AdmissionOptions(inUse: true); options.replace = true; return options }())
                #expect(try host.pool.forget(token: old.token) == nil, "it is another's by now")
                #expect(new.lease?.key == key)
                new.lease?.end()
                #expect(try host.pool.forget(token: new.token) == 30)
                try await host.admit("a", 20)
                #expect(try await host.pool.forgetAndDrain(key) == 20)
                #expect(await kind { try await host.pool.forgetAndDrain(key) } == .notFound)
                let charge = try host.pool.charge(bytes: 5)
                #expect(charge.bytes == 5)
                charge.end()
                #expect(charge.bytes == 0)
            }
        }

        @Test func aPauseQuiescesResidentsAndResumesThem() async throws {
            try await leavingNothing {
                let host = try HostPool()
                for id in ["a", "b"] {
                    var options = AdmissionOptions()
                    options.quiesce = { [log = host.log] in log.add("quiesce \(id)") }
                    options.resume = { [log = host.log] in log.add("resume \(id)") }
                    try await host.admit(id, 10, options)
                }
                try await host.admit("c")
                let before = host.log.lines.count
                let pause = try await host.pool.pause()
                #expect(Set(pause.quiesced) == [HostPool.key("a"), HostPool.key("b")])
                #expect(Set(host.log.lines[before...]) == ["quiesce a", "quiesce b"])
                #expect(pause.resume() && pause.quiesced.isEmpty)
                #expect(Set(host.log.lines[(before + 2)...]) == ["resume a", "resume b"])
            }
        }

        @Test func aQuiesceThatThrowsFailsThePauseAndOneThatIsGivenUpIsCancelled() async throws {
            try await leavingNothing {
                let host = try HostPool()
                var options = AdmissionOptions()
                options.quiesce = { throw Whoops() }
                try await host.admit("a", 10, options)
                #expect(await kind { _ = try await host.pool.pause() } == .callback)
                #expect(try !host.pool.status().paused)
                try await host.pool.evict(HostPool.key("a"))
                let begun = AsyncStream<Void>.makeStream()
                options.quiesce = { [log = host.log] in
                    begun.continuation.finish()
                    do { try await Task.sleep(for: .seconds(3600)) } catch { log.add("cancelled") }
                }
                try await host.admit("a", 10, options)
                let task = Task { try await host.pool.pause().resume() }
                for await _ in begun.stream {}
                task.cancel()
                #expect(await isCancelled { _ = try await task.value })
                #expect(await happens { host.log.lines.last == "cancelled" })
                #expect(await happens { try !host.pool.status().paused })
            }
        }

        @Test func aPoolMeasuresDrainsAndTellsItsBudget() async throws {
            try await leavingNothing {
                let log = HostPool.Log()
                let held = Held()
                var options = PoolOptions(budgetBytes: 100)
                options.drain = { log.add("drain") }
                options.budgetChanged = { log.add("budget \($0)") }
                options.memory = { PoolStatus.Memory(active: held.bytes, peak: 70) }
                options.settle = .zero
                let pool = try Pool(options)
                let key = HostPool.key("a")
                _ = try await pool.admit(key, cost: .bytes(10), load: { _ in held.bytes = 60; return nil }, release: { _ in held.bytes = 0 })
                #expect(try pool.status().memory == PoolStatus.Memory(active: 60, peak: 70))
                #expect(try !pool.hasRoom(bytes: 50) || pool.status().freeBytes <= 40, "what is really held counts")
                try pool.setBudget(bytes: 90)
                try await pool.evict(key)
                #expect(log.lines == ["budget 90", "drain"])
                try await pool.close()
            }
        }

        /// Those closures run inside the pool: what would wait for it for ever is an error instead.
        @Test func closuresInsideThePoolCannotHangIt() async throws {
            try await leavingNothing {
                let kinds = Kinds()
                var options = PoolOptions(budgetBytes: 100)
                options.memory = {
                    kinds.call { _ = try $0.status() }
                    return PoolStatus.Memory(active: 0)
                }
                options.budgetChanged = { _ in kinds.call { try $0.setBudget(bytes: 5) } }
                let pool = try Pool(options)
                kinds.pool = pool
                try pool.setBudget(bytes: 50)
                _ = try pool.status()
                #expect(try pool.budgetBytes == 50 && kinds.seen == [.busy])
                kinds.pool = nil
            }
        }
    }
}

/// What a host holds.
private final class Held: @unchecked Sendable {
    private let lock = NSLock()
    private var value = 0
    var bytes: Int {
        get { lock.withLock { value } }
        set { lock.withLock { value = newValue } }
    }
}

/// How calls from within a pool end.
private final class Kinds: @unchecked Sendable {
    private let lock = NSLock()
    private var held: Pool?
    private var kinds: Set<HobError.Kind?> = []

    var pool: Pool? {
        get { lock.withLock { held } }
        set { lock.withLock { held = newValue } }
    }

    var seen: Set<HobError.Kind?> { lock.withLock { kinds } }

    func call(_ body: (Pool) throws -> Void) {
        guard let pool else { return }
        do {
            try body(pool)
            lock.withLock { _ = kinds.insert(nil) }
        } catch {
            lock.withLock { _ = kinds.insert((error as? HobError)?.kind) }
        }
    }
}
