package import HobUniFFI

/// A device, a pool of models on it, and the verbs. The last reference closes it in the background; ``close()`` ends its work now.
///
/// A model is named by a directory (Hugging Face or MLX layout), a `.gguf` file, or a hub id in the local Hugging Face cache. It is loaded
/// at its first use and stays in the ``pool`` until it is evicted, idle for too long, or the engine closes.
///
/// Everything may be called from any task. Nothing here blocks a thread of Swift's: the work runs on the engine's own threads. Cancelling
/// the task that awaits a call ends the call, in any phase, with a `CancellationError`.
public final class Engine: Sendable {
    package let raw: RawEngine
    /// Who is resident: status, events, and room for a host's own residents.
    public let pool: Pool

    package init(raw: RawEngine) throws {
        self.raw = raw
        pool = Pool(raw: try attempt { try raw.pool() })
    }

    /// Opens an engine on MLX's default device: the GPU on Apple silicon, what MLX finds on Linux.
    ///
    /// Throws ``HobError/Kind/invalidArgument`` for options out of range, ``HobError/Kind/backend`` when MLX cannot start.
    public static func open(_ options: EngineOptions = EngineOptions()) async throws -> Engine {
        let given = try options.raw()
        return try Engine(raw: try await attempt { try await RawEngine.open(options: given) })
    }

    /// The device that computes.
    public var device: DeviceInfo {
        get throws { try decoded(try attempt { try raw.device() }) }
    }

    /// Whether requests are served now: a snapshot, not a promise. Never waits.
    public var availability: Availability {
        switch try? raw.availability() {
        case .ready: .ready
        case .working: .working
        case .quarantined: .quarantined
        case .closed, nil: .closed
        }
    }

    /// Requests taken on and not over. Never waits.
    public var requests: Int {
        count((try? raw.requests()) ?? 0)
    }

    // MARK: Models

    /// Reads a model's configuration and headers; loads nothing.
    ///
    /// Throws ``HobError/Kind/notFound``, ``HobError/Kind/badModel``, ``HobError/Kind/unsupported`` or ``HobError/Kind/io``.
    public func inspect(_ model: String, options: LoadOptions = LoadOptions()) async throws -> ModelInfo {
        try decoded(try await attempt { try await raw.inspect(model: model, options: options.raw) })
    }

    /// What a model will take, by part, before it is loaded. Throws as ``inspect(_:options:)``.
    public func estimate(_ model: String, options: LoadOptions = LoadOptions()) async throws -> Estimate {
        try await inspect(model, options: options).estimate
    }

    /// The verbs that a model serves. Throws as ``inspect(_:options:)``.
    public func capabilities(_ model: String) async throws -> Set<Capability> {
        Set(try await inspect(model).capabilities)
    }

    /// Makes a model resident without using it. `progress` is told fractions from 0 to 1, in order, and must not block.
    ///
    /// Throws what ``inspect(_:options:)`` throws, what the pool's admission throws, and what the load itself does.
    @discardableResult
    public func load(
        _ model: String, options: RequestOptions = RequestOptions(), progress: (@Sendable (Double) -> Void)? = nil
    ) async throws -> ModelInfo {
        let listener = progress.map(ProgressListener.init)
        return try decoded(
            try await attempt(cancelledBy: options.cancel) { token in
                try await raw.load(model: model, options: options.raw(token), progress: listener)
            })
    }

    // MARK: Verbs

    /// Starts generating. The stream's events come as the model produces them; errors after this call come from the stream.
    ///
    /// Throws ``HobError/Kind/invalidArgument`` for options out of range or an empty conversation, ``HobError/Kind/busy`` when too many
    /// wait, ``HobError/Kind/closed`` after ``close()``.
    public func generate(_ prompt: Prompt, model: String, options: GenerationOptions = GenerationOptions()) throws -> GenerationStream {
        GenerationStream(try attempt { try raw.generate(request: try options.raw(prompt, model: model)) })
    }

    /// Turns texts into vectors, in the order given. Many texts in one call are faster than many calls.
    ///
    /// Throws ``HobError/Kind/invalidArgument`` for bad options or a text that is too long, ``HobError/Kind/unsupported`` when the model
    /// does not embed, and what loading throws.
    public func embed(_ texts: [String], model: String, options: EmbeddingOptions = EmbeddingOptions()) async throws -> Embeddings {
        let dimensions = try options.dimensions.map { try unsigned($0, "dimensions") }
        return try Embeddings(
            try await attempt(cancelledBy: options.request.cancel) { token in
                try await raw.embed(
                    request: RawEmbed(
                        model: model, texts: texts, promptName: options.promptName, dimensions: dimensions,
                        normalize: options.normalize, truncate: options.truncation.raw, options: options.request.raw(token)))
            })
    }

    /// Turns one text into a vector. As ``embed(_:model:options:)-([String],_,_)``.
    public func embed(_ text: String, model: String, options: EmbeddingOptions = EmbeddingOptions()) async throws -> Embedding {
        guard let vector = try await embed([text], model: model, options: options).first else {
            throw HobError(.internal, "a text came back without its vector")
        }
        return vector
    }

    /// Orders documents by how well they answer a query: with a reranker, or with an embedder, whose score is a cosine. Throws as
    /// ``embed(_:model:options:)-([String],_,_)``.
    public func rerank(
        _ query: String, documents: [String], model: String, options: RankingOptions = RankingOptions()
    ) async throws -> Ranking {
        let top = try options.top.map { try unsigned($0, "top") }
        return try Ranking(
            try await attempt(cancelledBy: options.request.cancel) { token in
                try await raw.rerank(
                    request: RawRerank(
                        model: model, query: query, documents: documents, instruct: options.instruct, topN: top,
                        unsorted: options.unsorted, truncate: options.truncation.raw, options: options.request.raw(token)))
            })
    }

    /// Log-probabilities of a given completion. Throws ``HobError/Kind/invalidArgument`` for an empty completion or one that does not fit,
    /// and what loading throws.
    public func score(
        _ completion: String, after prompt: Prompt, model: String, options: RequestOptions = RequestOptions()
    ) async throws -> Score {
        let prompt = try prompt.raw(TemplateOptions())
        let score = try await attempt(cancelledBy: options.cancel) { token in
            try await raw.score(model: model, prompt: prompt, completion: completion, options: options.raw(token))
        }
        return Score(tokenIDs: score.tokens, logprobs: score.logprobs, meanNegativeLogLikelihood: score.meanNll)
    }

    /// Which of given answers the model holds most likely, without sampling. At most 256 answers, none empty.
    ///
    /// Throws ``HobError/Kind/unsupported`` when the model does not generate, and as ``score(_:after:model:options:)``.
    public func decide(
        _ prompt: Prompt, among answers: [String], kind: DecisionKind = .choice, model: String,
        template: TemplateOptions = TemplateOptions(), options: RequestOptions = RequestOptions()
    ) async throws -> Decision {
        let prompt = try prompt.raw(template)
        return try Decision(
            try await attempt(cancelledBy: options.cancel) { token in
                try await raw.decide(
                    model: model, prompt: prompt, answers: answers, decision: kind.raw, options: options.raw(token))
            })
    }

    /// A model's tokenizer and chat template, without its weights. Keep it: reading a large vocabulary takes a while.
    ///
    /// Throws as ``inspect(_:options:)``.
    public func tokenizer(_ model: String) async throws -> Tokenizer {
        try Tokenizer(try await attempt { try await raw.tokenizer(model: model) })
    }

    // MARK: The end

    /// Holds back new loads until the result is resumed or let go of, once every model is at rest; running work goes on.
    public func pause(cancel: CancelToken? = nil) async throws -> Pause {
        try await pool.pause(cancel: cancel)
    }

    /// Ends every request with ``HobError/Kind/closed``, unloads every model and gives the memory back. Returns after
    /// ``EngineOptions/closeTimeout`` at the latest, and says whether everything had stopped by then; if not, it goes on in the
    /// background. Closing again is allowed. Cancelling the task does not stop the closing.
    ///
    /// Throws one error that names every release that failed; the models are gone all the same.
    @discardableResult
    public func close() async throws -> Bool {
        try await attempt { try await raw.close() }
    }

    /// As ``close()``, however long it takes. Cancelling the task ends the waiting only.
    public func closeAndWait() async throws {
        try await attempt(cancelledBy: nil, begins: true) { try await raw.closeAndWait(cancel: $0) }
    }
}

/// Whether an engine serves requests.
public enum Availability: Sendable, Hashable {
    /// Nothing is under way.
    case ready
    /// Requests are under way; more are taken.
    case working
    /// The device has not come back from work that was given up: requests are refused with ``HobError/Kind/busy`` until it does.
    case quarantined
    /// The engine is closed.
    case closed
}

private final class ProgressListener: RawProgress {
    private let progress: @Sendable (Double) -> Void

    init(_ progress: @escaping @Sendable (Double) -> Void) {
        self.progress = progress
    }

    func report(fraction: Double) {
        progress(fraction)
    }
}
