/// A conversation with one model: it keeps the transcript, and each turn is what the whole of it leads to.
///
/// ```swift
/// let session = Session(engine: engine, model: model, instructions: "Answer in one sentence.")
/// let answer = try await session.respond(to: "What is the capital of France?")
/// print(answer.content)
/// ```
///
/// One turn at a time: a second one gets ``HobError/Kind/busy``. A turn joins the transcript when it is complete; one that fails, is
/// cancelled, or is left half-read leaves the transcript as it was. Any task may use a session.
public final class Session: Sendable {
    /// The engine that answers.
    public let engine: Engine
    /// The model's reference.
    public let model: String
    /// Tools that the model may call. Hob reads the calls; the host makes them and answers with ``respond(to:options:)-([ToolOutput],_)``.
    public let tools: [Tool]
    private let state: Locked<State>

    private struct State {
        var transcript: [Message]
        var isResponding = false
    }

    /// A session whose model is told `instructions` first.
    public convenience init(engine: Engine, model: String, tools: [Tool] = [], instructions: String? = nil) {
        self.init(engine: engine, model: model, tools: tools, transcript: instructions.map { [.system($0)] } ?? [])
    }

    /// A session that goes on from an earlier transcript.
    public init(engine: Engine, model: String, tools: [Tool] = [], transcript: [Message]) {
        self.engine = engine
        self.model = model
        self.tools = tools
        state = Locked(State(transcript: transcript))
    }

    /// All that was said, instructions included.
    public var transcript: [Message] {
        state.with { $0.transcript }
    }

    /// Whether a turn is under way.
    public var isResponding: Bool {
        state.with { $0.isResponding }
    }

    /// Loads the model in the background, so that the first answer comes sooner. The task tells when it is there.
    @discardableResult
    public func prewarm() -> Task<Void, any Error> {
        Task { [engine, model] in
            _ = try await engine.load(model)
        }
    }

    /// A whole turn.
    public struct Response: Sendable, Hashable {
        /// What the model answered.
        public var content: String
        /// What it thought before, where its template marks that.
        public var reasoning: String
        /// Calls that it wants made; answer them with ``Session/respond(to:options:)-([ToolOutput],_)``.
        public var toolCalls: [ToolCall]
        /// How it ended: reason, tokens, times.
        public var summary: Summary
    }

    /// The result of a tool, for the call of that id.
    public struct ToolOutput: Sendable, Hashable {
        public var callID: String
        public var content: String

        public init(callID: String, content: String) {
            self.callID = callID
            self.content = content
        }
    }

    /// Answers a prompt. Throws what generating throws.
    public func respond(to prompt: String, options: GenerationOptions = GenerationOptions()) async throws -> Response {
        try await streamResponse(to: prompt, options: options).collect()
    }

    /// Goes on after calls of tools were made.
    public func respond(to outputs: [ToolOutput], options: GenerationOptions = GenerationOptions()) async throws -> Response {
        try await streamResponse(to: outputs, options: options).collect()
    }

    /// Answers a prompt piece by piece. The turn begins with the first read; errors come from the stream.
    public func streamResponse(to prompt: String, options: GenerationOptions = GenerationOptions()) -> ResponseStream {
        ResponseStream(session: self, messages: [.user(prompt)], options: options)
    }

    /// As ``respond(to:options:)-([ToolOutput],_)``, piece by piece.
    public func streamResponse(to outputs: [ToolOutput], options: GenerationOptions = GenerationOptions()) -> ResponseStream {
        ResponseStream(session: self, messages: outputs.map { .tool($0.content, answering: $0.callID) }, options: options)
    }

    fileprivate func begin(_ messages: [Message], _ options: GenerationOptions) throws -> GenerationStream {
        let transcript = try state.with { state in
            if state.isResponding {
                throw HobError(.busy, "the session is at another turn; wait for its end, or use a second session")
            }
            state.isResponding = true
            return state.transcript
        }
        do {
            var options = options
            options.template.tools = tools + options.template.tools
            return try engine.generate(.chat(transcript + messages), model: model, options: options)
        } catch {
            end(nil)
            throw error
        }
    }

    fileprivate func end(_ turn: [Message]?) {
        state.with { state in
            state.transcript += turn ?? []
            state.isResponding = false
        }
    }
}

/// A turn, piece by piece, for one reader. Leaving the loop ends the turn, and the transcript stays as it was.
public struct ResponseStream: AsyncSequence, Sendable {
    /// The answer so far.
    public struct Snapshot: Sendable {
        /// What is new: text of the answer.
        public var delta: String
        /// What is new: reasoning, where the model's template marks it.
        public var reasoningDelta: String
        /// Calls of tools so far.
        public var toolCalls: [ToolCall]
        /// How the turn ended; of the last snapshot only.
        public var summary: Summary?
        fileprivate let text: Locked<[UInt8]>
        fileprivate let length: Int

        /// All of the answer's text up to here. Costs its length at each call: a view that draws asks once a frame.
        public var content: String {
            text.with { String(decoding: $0[..<length], as: UTF8.self) }
        }
    }

    public typealias Element = Snapshot

    private let session: Session
    private let messages: [Message]
    private let options: GenerationOptions

    init(session: Session, messages: [Message], options: GenerationOptions) {
        self.session = session
        self.messages = messages
        self.options = options
    }

    public func makeAsyncIterator() -> Iterator {
        Iterator(session: session, messages: messages, options: options)
    }

    /// The whole turn.
    public func collect() async throws -> Session.Response {
        var reasoning = ""
        for try await snapshot in self {
            reasoning += snapshot.reasoningDelta
            if let summary = snapshot.summary {
                return Session.Response(
                    content: snapshot.content, reasoning: reasoning, toolCalls: snapshot.toolCalls, summary: summary)
            }
        }
        throw HobError(.internal, "a turn ended without its last event")
    }

    public struct Iterator: AsyncIteratorProtocol {
        private let session: Session
        private let messages: [Message]
        private let options: GenerationOptions
        private var turn: Turn?
        private var events: GenerationStream.Iterator?
        private let text = Locked<[UInt8]>([])
        private var length = 0
        private var reasoning = ""
        private var toolCalls: [ToolCall] = []

        init(session: Session, messages: [Message], options: GenerationOptions) {
            self.session = session
            self.messages = messages
            self.options = options
        }

        /// The next snapshot; nil after the last one.
        public mutating func next() async throws -> Snapshot? {
            if turn == nil {
                events = try session.begin(messages, options).makeAsyncIterator()
                turn = Turn(session)
            }
            while true {
                let event: GenerationEvent?
                do {
                    event = try await events?.next()
                } catch {
                    turn?.end(nil)
                    throw error
                }
                switch event {
                case nil:
                    return nil
                case .chunk(let chunk):
                    text.with { $0 += chunk.text.utf8 }
                    length += chunk.text.utf8.count
                    reasoning += chunk.reasoning
                    return snapshot(chunk.text, chunk.reasoning, nil)
                case .toolCall(let call):
                    toolCalls.append(call)
                    return snapshot("", "", nil)
                case .rejectedCall:
                    continue
                case .finished(let summary):
                    let last = snapshot("", "", summary)
                    let answer = Message(
                        role: .assistant, content: toolCalls.isEmpty || length > 0 ? last.content : nil,
                        reasoning: reasoning.isEmpty ? nil : reasoning, toolCalls: toolCalls)
                    turn?.end(messages + [answer])
                    return last
                }
            }
        }

        private func snapshot(_ delta: String, _ reasoning: String, _ summary: Summary?) -> Snapshot {
            Snapshot(delta: delta, reasoningDelta: reasoning, toolCalls: toolCalls, summary: summary, text: text, length: length)
        }
    }

    /// A turn under way; whoever lets go of it half-way frees the session.
    private final class Turn: Sendable {
        private let session: Session
        private let isOver = Locked(false)

        init(_ session: Session) {
            self.session = session
        }

        func end(_ turn: [Message]?) {
            let first = isOver.with { isOver in
                defer { isOver = true }
                return !isOver
            }
            if first { session.end(turn) }
        }

        deinit {
            end(nil)
        }
    }
}
