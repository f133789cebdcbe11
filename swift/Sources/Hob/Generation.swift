internal import HobUniFFI

/// What a model continues.
public enum Prompt: Sendable, Hashable {
    /// A conversation, rendered by the model's chat template.
    case chat([Message])
    /// Text as it is, without a template. Special tokens spelled in it count.
    case raw(String)
    /// Token ids as they are.
    case tokens([UInt32])

    func raw(_ template: TemplateOptions) throws -> RawPrompt {
        switch self {
        case .chat(let messages):
            .chat(messagesJson: try encoded(messages, as: "the messages"), renderJson: try encoded(template, as: "the template's options"))
        case .raw(let text): .raw(text: text)
        case .tokens(let ids): .tokens(ids: ids)
        }
    }
}

extension Prompt: ExpressibleByStringLiteral {
    /// A conversation of one user's message.
    public init(stringLiteral value: String) { self = .chat([.user(value)]) }
}

/// What a model's chat template is given beside the messages.
public struct TemplateOptions: Sendable, Hashable, Encodable {
    /// End with the opening of the assistant's turn. Without it the model goes on with the last message.
    public var addsGenerationPrompt = true
    /// Tools that the model may call.
    public var tools: [Tool]
    /// Documents, for templates with retrieval.
    public var documents: [JSONValue]
    /// Switches reasoning on or off, where the template knows `enable_thinking`.
    public var reasoning: Bool?
    /// Further variables of the template.
    public var variables: [String: JSONValue]

    public init(tools: [Tool] = [], documents: [JSONValue] = [], reasoning: Bool? = nil, variables: [String: JSONValue] = [:]) {
        self.tools = tools
        self.documents = documents
        self.reasoning = reasoning
        self.variables = variables
    }

    private enum CodingKeys: String, CodingKey {
        case tools, documents, extra
        case addsGenerationPrompt = "add_generation_prompt"
        case reasoning = "enable_thinking"
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: CodingKeys.self)
        if !addsGenerationPrompt { try fields.encode(false, forKey: .addsGenerationPrompt) }
        if !tools.isEmpty { try fields.encode(tools, forKey: .tools) }
        if !documents.isEmpty { try fields.encode(documents, forKey: .documents) }
        try fields.encodeIfPresent(reasoning, forKey: .reasoning)
        if !variables.isEmpty { try fields.encode(variables, forKey: .extra) }
    }
}

/// How the next token is chosen. The default is greedy.
public struct Sampling: Sendable, Hashable {
    /// Softmax temperature, 0 to 100; 0 is greedy.
    public var temperature: Float = 0
    /// Keep only so many of the likeliest tokens; 0 keeps all.
    public var topK = 0
    /// Keep the smallest set of tokens with this much probability, in (0, 1].
    public var topP: Float = 1
    /// Keep tokens at least this likely beside the likeliest, in [0, 1].
    public var minP: Float = 0
    /// Makes tokens that were said less likely, in (0, 10]; 1 is off.
    public var repetitionPenalty: Float = 1
    /// How many of the latest tokens the penalty looks at; 0 means all.
    public var repetitionWindow = 64
    /// Seed of the random numbers; nil draws one.
    public var seed: UInt64?

    public init(temperature: Float = 0, topP: Float = 1, topK: Int = 0, minP: Float = 0, seed: UInt64? = nil) {
        self.temperature = temperature
        self.topP = topP
        self.topK = topK
        self.minP = minP
        self.seed = seed
    }

    /// The likeliest token, always.
    public static let greedy = Sampling()

    func raw() throws -> RawSampling {
        RawSampling(
            temperature: temperature, topK: try unsigned32(topK, "topK"), topP: topP, minP: minP, repetitionPenalty: repetitionPenalty,
            repetitionWindow: try unsigned32(repetitionWindow, "repetitionWindow"), seed: seed)
    }
}

/// Which marks a model's answers hold. A model's own is ``Tokenizer/format``; who knows better gives another. The default marks nothing.
public struct ChatFormat: Sendable, Hashable, Codable {
    /// How a model writes a call of a tool.
    public enum ToolFormat: String, Sendable, Hashable, Codable, CaseIterable {
        /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen do, or with Qwen3-Coder's `<function=name>` inside.
        case hermes
        /// `{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`: Llama 3.
        case llama3
        /// `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
        case mistral
    }

    /// What a model puts around its reasoning.
    public struct ReasoningMarks: Sendable, Hashable, Codable {
        /// Begins it, such as `<think>`.
        public var open: String
        /// Ends it, such as `</think>`.
        public var close: String

        public init(open: String, close: String) {
            self.open = open
            self.close = close
        }
    }

    /// How calls are written; nil: calls are not looked for.
    public var tools: ToolFormat?
    /// What is around reasoning; nil: it is not told from the answer.
    public var reasoning: ReasoningMarks?

    public init(tools: ToolFormat? = nil, reasoning: ReasoningMarks? = nil) {
        self.tools = tools
        self.reasoning = reasoning
    }
}

/// How an answer is made.
public struct GenerationOptions: Sendable {
    /// How tokens are chosen.
    public var sampling: Sampling
    /// New tokens at most; nil stops only at the context's end.
    public var maxTokens: Int?
    /// Strings that end the answer; none of their text is given out.
    public var stop: [String]
    /// Report each token's log-probability and so many alternatives, at most 100.
    public var logprobs: Int?
    /// What happens to a prompt longer than the context.
    public var truncation = Truncation.error
    /// Gather so many tokens into a chunk; 0 and 1 send each as it comes.
    public var chunkTokens = 0
    /// How long the first of them may wait; zero does not limit it.
    public var chunkInterval = Duration.zero
    /// Whether computed prompts kept from earlier may serve this one.
    public var usesPromptCache = true
    /// What the chat template is given.
    public var template: TemplateOptions
    /// How reasoning and calls of tools are told from a conversation's answer; nil: as the model's template shows.
    public var format: ChatFormat?
    /// Cancel, timeout, loading.
    public var request: RequestOptions

    public init(
        maxTokens: Int? = nil, sampling: Sampling = .greedy, stop: [String] = [], logprobs: Int? = nil,
        template: TemplateOptions = TemplateOptions(), request: RequestOptions = RequestOptions()
    ) {
        self.maxTokens = maxTokens
        self.sampling = sampling
        self.stop = stop
        self.logprobs = logprobs
        self.template = template
        self.request = request
    }

    func raw(_ prompt: Prompt, model: String) throws -> RawGenerate {
        RawGenerate(
            model: model, prompt: try prompt.raw(template), formatJson: try format.map { try encoded($0, as: "the format") },
            sampling: try sampling.raw(), maxTokens: try maxTokens.map { try unsigned($0, "maxTokens") }, stop: stop,
            logprobs: try logprobs.map { try unsigned32($0, "logprobs") }, truncate: truncation.raw,
            chunkTokens: try unsigned(chunkTokens, "chunkTokens"), chunkS: chunkInterval.seconds, promptCache: usesPromptCache,
            options: request.raw(request.cancel?.raw))
    }
}

/// Tokens and times of a computation.
public struct Usage: Sendable, Hashable {
    /// Tokens of the input, special ones included.
    public var promptTokens: Int
    /// Tokens of the input that were cut off.
    public var droppedTokens: Int
    /// Prompt tokens that did not have to be computed.
    public var cachedTokens = 0
    /// New tokens, without the one that ends a turn.
    public var completionTokens = 0
    /// Time by phase; nil means that it did not happen.
    public var queue: Duration
    public var load: Duration?
    public var prefill: Duration?
    public var decode: Duration?
    public var total: Duration

    init(_ raw: RawUsage) {
        promptTokens = count(raw.promptTokens)
        droppedTokens = count(raw.droppedTokens)
        queue = .seconds(raw.queueS)
        load = raw.loadS.map { .seconds($0) }
        prefill = raw.prefillS.map { .seconds($0) }
        decode = raw.decodeS.map { .seconds($0) }
        total = .seconds(raw.totalS)
    }
}

/// Why a generation ended.
public enum FinishReason: String, Sendable, Hashable {
    /// The model ended its turn, or a stop string appeared.
    case stop
    /// `maxTokens` were produced.
    case length
    /// The model's context is full.
    case context
    /// Stopped by the caller, who wanted what there is.
    case cancelled
    /// The time was up, with ``RequestOptions/stopsOnCancel``.
    case timeout

    init(_ raw: RawFinish) {
        self =
            switch raw {
            case .stop: .stop
            case .length: .length
            case .context: .context
            case .cancelled: .cancelled
            case .timeout: .timeout
            }
    }
}

/// A token's log-probability and the likeliest alternatives.
public struct TokenLogprobs: Sendable, Hashable {
    /// Natural logarithm of the chosen token's probability.
    public var logprob: Float
    /// The likeliest tokens, the likeliest first.
    public var top: [Alternative]

    public struct Alternative: Sendable, Hashable {
        public var id: UInt32
        public var logprob: Float
    }
}

/// A piece of an answer.
public struct Chunk: Sendable, Hashable {
    /// Whole characters, possibly none.
    public var text = ""
    /// Reasoning, where the model's template marks it; it comes before the text.
    public var reasoning = ""
    /// The tokens this piece comes from.
    public var tokenIDs: [UInt32] = []
    /// One per token, when asked for.
    public var logprobs: [TokenLogprobs] = []
}

/// The end of an answer.
public struct Summary: Sendable, Hashable {
    /// Why it ended.
    public var finish: FinishReason
    /// Which stop string was found, as an index into the request's.
    public var stopIndex: Int?
    /// Tokens and times.
    public var usage: Usage
    /// The seed in use, when tokens were drawn.
    public var seed: UInt64?
    /// Which model answered.
    public var provenance: Provenance?
}

/// What began as a call of a tool and is none that could be made.
public struct RejectedCall: Sendable, Hashable {
    /// What is wrong with it, as far as a program would act differently.
    public enum Reason: Sendable, Hashable, CaseIterable {
        /// The answer ended inside the call: raise `maxTokens`.
        case incomplete
        /// It is longer than ``Limits/callBytes``.
        case tooLarge
        /// It is not valid JSON, or not in the model's format.
        case malformed
        /// It names no function.
        case noName
        /// It names a function that is not among the request's tools.
        case unknownTool
        /// Its arguments are not a JSON object.
        case badArguments
        /// What a later version of the library knows.
        case other
    }

    /// The model's text, marks included.
    public var text: String
    /// What is wrong with it.
    public var reason: Reason
    /// The same in one sentence, without the model's words.
    public var message: String
}

extension RejectedCall.Reason {
    init(_ raw: RawRejectReason) {
        self =
            switch raw {
            case .incomplete: .incomplete
            case .tooLarge: .tooLarge
            case .malformed: .malformed
            case .noName: .noName
            case .unknownTool: .unknownTool
            case .badArguments: .badArguments
            case .other: .other
            }
    }
}

/// What a stream yields: chunks and calls, then exactly one `finished`, unless it ends in an error.
public enum GenerationEvent: Sendable, Hashable {
    /// More of the answer.
    case chunk(Chunk)
    /// A call of one of the request's tools, complete.
    case toolCall(ToolCall)
    /// A call that could not be read. The stream goes on.
    case rejectedCall(RejectedCall)
    /// The end: the memory is back and the model's use has ended.
    case finished(Summary)

    init(_ raw: RawEvent) throws {
        switch raw {
        case .chunk(let text, let reasoning, let tokenIds, let logprobs):
            let logprobs = logprobs.map { token in
                TokenLogprobs(
                    logprob: token.logprob,
                    top: zip(token.topIds, token.topLogprobs).map { TokenLogprobs.Alternative(id: $0, logprob: $1) })
            }
            self = .chunk(Chunk(text: text, reasoning: reasoning, tokenIDs: tokenIds, logprobs: logprobs))
        case .toolCall(let id, let name, let arguments):
            self = .toolCall(ToolCall(id: id, name: name, argumentsJSON: arguments))
        case .rejectedCall(let raw, let reason, let message):
            self = .rejectedCall(RejectedCall(text: raw, reason: RejectedCall.Reason(reason), message: message))
        case .finished(let raw):
            var usage = Usage(raw.usage)
            usage.cachedTokens = count(raw.cachedTokens)
            usage.completionTokens = count(raw.completionTokens)
            self = .finished(
                Summary(
                    finish: FinishReason(raw.finish), stopIndex: raw.stopIndex.map(count), usage: usage, seed: raw.seed,
                    provenance: try raw.provenanceJson.map { try decoded($0) }))
        }
    }
}

/// A whole answer.
public struct Generation: Sendable, Hashable {
    /// The text, without the stop string that ended it.
    public var text = ""
    /// The reasoning, where the model's template marks it.
    public var reasoning = ""
    /// Calls of the request's tools, in order.
    public var toolCalls: [ToolCall] = []
    /// Calls that could not be read.
    public var rejectedCalls: [RejectedCall] = []
    /// Its tokens.
    public var tokenIDs: [UInt32] = []
    /// One per token, when asked for.
    public var logprobs: [TokenLogprobs] = []
    /// How it ended.
    public var summary: Summary
}

/// The events of one generation, for one reader.
///
/// Leaving the loop ends the generation, as does cancelling the task that reads, or letting go of a stream that nobody reads. A reader that
/// falls behind pauses its own generation only; it then gets all that is ready at once.
public struct GenerationStream: AsyncSequence, Sendable {
    public typealias Element = GenerationEvent

    private let raw: RawStream

    init(_ raw: RawStream) {
        self.raw = raw
    }

    public func makeAsyncIterator() -> Iterator {
        Iterator(reading: Reading(raw))
    }

    /// Ends the generation with what there is: the last event is `finished`, with ``FinishReason/cancelled``. Any thread.
    public func stop() {
        try? raw.stop()
    }

    /// Ends the generation with ``HobError/Kind/cancelled``. Any thread.
    public func cancel() {
        try? raw.cancel()
    }

    /// The rest of the answer as one value. Throws ``HobError/Kind/closed`` when the stream is over already.
    public func collect() async throws -> Generation {
        var whole = Chunk()
        var (calls, rejected) = ([ToolCall](), [RejectedCall]())
        for try await event in self {
            switch event {
            case .chunk(let chunk):
                whole.text += chunk.text
                whole.reasoning += chunk.reasoning
                whole.tokenIDs += chunk.tokenIDs
                whole.logprobs += chunk.logprobs
            case .toolCall(let call): calls.append(call)
            case .rejectedCall(let call): rejected.append(call)
            case .finished(let summary):
                return Generation(
                    text: whole.text, reasoning: whole.reasoning, toolCalls: calls, rejectedCalls: rejected, tokenIDs: whole.tokenIDs,
                    logprobs: whole.logprobs, summary: summary)
            }
        }
        throw HobError(.closed, "the stream is over: its last event was read before")
    }

    public struct Iterator: AsyncIteratorProtocol {
        fileprivate let reading: Reading
        fileprivate var ready: ArraySlice<RawEvent> = []

        /// The next event; nil after the last one.
        public mutating func next() async throws -> GenerationEvent? {
            if ready.isEmpty {
                ready = try await reading.next()[...]
            }
            return try ready.popFirst().map { try GenerationEvent($0) }
        }
    }

    /// The end of an iterator, which is the end of its generation.
    fileprivate final class Reading: Sendable {
        private let raw: RawStream

        init(_ raw: RawStream) {
            self.raw = raw
        }

        func next() async throws -> [RawEvent] {
            do {
                return try await withTaskCancellationHandler {
                    try await raw.next()
                } onCancel: {
                    try? raw.cancel()
                }
            } catch {
                throw hobError(error)
            }
        }

        deinit {
            try? raw.cancel()
        }
    }
}
