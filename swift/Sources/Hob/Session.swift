import Observation

/// A conversation with one model: it keeps the transcript, and each turn is what the whole of it leads to.
///
/// ```swift
/// let session = Session(engine: engine, model: model, instructions: "Answer in one sentence.")
/// let answer = try await session.respond(to: "What is the capital of France?")
/// print(answer.content)
/// ```
///
/// One turn at a time: a second one gets ``HobError/Kind/busy``. A turn joins the transcript when it is complete; one that fails, is
/// cancelled, or is left half-read leaves the transcript as it was. Any task may use a session; views observe ``transcript`` and
/// ``isResponding``.
public final class Session: Sendable, Observable {
    /// The engine that answers.
    public let engine: Engine
    /// The model's reference.
    public let model: String
    /// Tools that the model may call. Hob reads the calls; the host makes them and answers with ``respond(to:options:)-([ToolOutput],_)``.
    public let tools: [Tool]
    private let state: Locked<State>
    private let registrar = ObservationRegistrar()

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
        registrar.access(self, keyPath: \.transcript)
        return state.with { $0.transcript }
    }

    /// Whether a turn is under way.
    public var isResponding: Bool {
        registrar.access(self, keyPath: \.isResponding)
        return state.with { $0.isResponding }
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
        /// Calls that could not be read; they are not in the transcript.
        public var rejectedCalls: [RejectedCall]
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
        let transcript = try registrar.withMutation(of: self, keyPath: \.isResponding) {
            try state.with { state in
                if state.isResponding {
                    throw HobError(.busy, "the session is at another turn; wait for its end, or use a second session")
                }
                state.isResponding = true
                return state.transcript
            }
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

    /// The transcript first: who sees that the turn is over sees what it said.
    fileprivate func end(_ turn: [Message]?) {
        if let turn {
            registrar.withMutation(of: self, keyPath: \.transcript) { state.with { $0.transcript += turn } }
        }
        registrar.withMutation(of: self, keyPath: \.isResponding) { state.with { $0.isResponding = false } }
    }
}

/// A turn, piece by piece, for one reader: a second one gets ``HobError/Kind/busy``, for a turn is asked once. Leaving the loop ends the
/// turn, and the transcript stays as it was.
public struct ResponseStream: AsyncSequence, Sendable {
    /// The answer so far.
    public struct Snapshot: Sendable {
        /// What is new: text of the answer.
        public var delta: String
        /// What is new: reasoning, where the model's template marks it.
        public var reasoningDelta: String
        /// Calls of tools so far.
        public var toolCalls: [ToolCall]
        /// Calls so far that could not be read.
        public var rejectedCalls: [RejectedCall]
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

    private let question: Question

    init(session: Session, messages: [Message], options: GenerationOptions) {
        question = Question(session: session, messages: messages, options: options)
    }

    public func makeAsyncIterator() -> Iterator {
        Iterator(question)
    }

    /// The whole turn.
    public func collect() async throws -> Session.Response {
        var reasoning = ""
        for try await snapshot in self {
            reasoning += snapshot.reasoningDelta
            if let summary = snapshot.summary {
                return Session.Response(
                    content: snapshot.content, reasoning: reasoning, toolCalls: snapshot.toolCalls, rejectedCalls: snapshot.rejectedCalls,
                    summary: summary)
            }
        }
        throw HobError(.closed, "the turn is over: its last snapshot was read before")
    }

    public struct Iterator: AsyncIteratorProtocol {
        private let question: Question
        private var turn: Turn?
        private var isOver = false
        private var events: GenerationStream.Iterator?
        private let text = Locked<[UInt8]>([])
        private var length = 0
        private var reasoning = ""
        private var toolCalls: [ToolCall] = []
        private var rejectedCalls: [RejectedCall] = []

        fileprivate init(_ question: Question) {
            self.question = question
        }

        /// The next snapshot; nil after the last one, and after an error.
        public mutating func next() async throws -> Snapshot? {
            if isOver { return nil }
            do {
                let snapshot = try await following()
                isOver = snapshot?.summary != nil
                return snapshot
            } catch {
                isOver = true
                throw error
            }
        }

        private mutating func following() async throws -> Snapshot? {
            if turn == nil {
                let (events, turn) = try question.ask()
                (self.events, self.turn) = (events.makeAsyncIterator(), turn)
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
                case .rejectedCall(let call):
                    rejectedCalls.append(call)
                    return snapshot("", "", nil)
                case .finished(let summary):
                    let last = snapshot("", "", summary)
                    let answer = Message(
                        role: .assistant, content: toolCalls.isEmpty || length > 0 ? last.content : nil,
                        reasoning: reasoning.isEmpty ? nil : reasoning, toolCalls: toolCalls)
                    turn?.end(question.messages + [answer])
                    return last
                }
            }
        }

        private func snapshot(_ delta: String, _ reasoning: String, _ summary: Summary?) -> Snapshot {
            Snapshot(
                delta: delta, reasoningDelta: reasoning, toolCalls: toolCalls, rejectedCalls: rejectedCalls, summary: summary, text: text,
                length: length)
        }
    }

    /// What is asked, once.
    fileprivate final class Question: Sendable {
        let messages: [Message]
        private let session: Session
        private let options: GenerationOptions
        private let isAsked = Locked(false)

        init(session: Session, messages: [Message], options: GenerationOptions) {
            self.session = session
            self.messages = messages
            self.options = options
        }

        func ask() throws -> (GenerationStream, Turn) {
            let first = isAsked.with { isAsked in
                defer { isAsked = true }
                return !isAsked
            }
            guard first else { throw HobError(.busy, "the turn has had its reader; ask the session again for another turn") }
            return (try session.begin(messages, options), Turn(session))
        }
    }

    /// A turn under way; whoever lets go of it half-way frees the session.
    fileprivate final class Turn: Sendable {
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
