internal import HobUniFFI

/// Documents by how well they answer a query.
public struct Ranking: Sendable, Hashable {
    /// One document's place.
    public struct Result: Sendable, Hashable {
        /// Which document, as an index into the request's.
        public var index: Int
        /// The classifier's raw output; nil for a cosine.
        public var logit: Float?
        /// Higher is better; see ``Ranking/scoreKind``.
        public var score: Float
    }

    /// What a score means.
    public enum ScoreKind: Sendable, Hashable {
        /// A probability, 0 to 1.
        case normalized
        /// A cosine, -1 to 1: an approximation by an embedder.
        case cosine
    }

    /// Best first, ties by index, unless the request asked for the documents' order.
    public var results: [Result]
    /// What the scores mean.
    public var scoreKind: ScoreKind
    /// Tokens and times.
    public var usage: Usage
    /// Which model computed it.
    public var provenance: Provenance

    init(_ raw: RawRanking) throws {
        results = raw.results.map { Result(index: count($0.index), logit: $0.logit, score: $0.score) }
        scoreKind = raw.isCosine ? .cosine : .normalized
        usage = Usage(raw.usage)
        provenance = try decoded(raw.provenanceJson)
    }
}

/// How documents are ranked.
public struct RankingOptions: Sendable {
    /// An instruction, for rerankers that take one.
    public var instruct: String?
    /// Keep only the best so many; nil keeps all.
    public var top: Int?
    /// Leave the results in the order of the documents.
    public var unsorted = false
    /// What happens to a pair longer than the model takes.
    public var truncation = Truncation.error
    /// Cancel, timeout, loading.
    public var request: RequestOptions

    public init(top: Int? = nil, instruct: String? = nil, request: RequestOptions = RequestOptions()) {
        self.top = top
        self.instruct = instruct
        self.request = request
    }
}

/// Log-probabilities of a given completion.
public struct Score: Sendable, Hashable {
    /// The completion's tokens.
    public var tokenIDs: [UInt32]
    /// The natural logarithm of each token's probability, given all before it.
    public var logprobs: [Float]
    /// Minus the mean of `logprobs`.
    public var meanNegativeLogLikelihood: Double
}

/// How answers relate to each other, which is what a confidence depends on.
public enum DecisionKind: Sendable, Hashable, CaseIterable {
    /// One of several things.
    case choice
    /// Levels of one thing, the lowest first; the decision has a ``Decision/value``.
    case score
    /// Yes or no: two answers, no confidence.
    case predicate

    var raw: RawDecision {
        switch self {
        case .choice: .choice
        case .score: .score
        case .predicate: .predicate
        }
    }
}

/// Which of given answers a model holds most likely.
public struct Decision: Sendable, Hashable {
    public struct Answer: Sendable, Hashable {
        /// The mean of its tokens' log-probabilities, what ends the turn included.
        public var meanLogprob: Double
        /// Its probability among the answers given.
        public var probability: Double
    }

    /// The answers in the order given.
    public var answers: [Answer]
    /// The index of the likeliest, of equal ones the first.
    public var best: Int
    /// 0 to 1; nil for a predicate.
    public var confidence: Double?
    /// The mean level, counted from 0, of a score.
    public var value: Double?
    /// Tokens and times.
    public var usage: Usage
    /// Which model decided.
    public var provenance: Provenance

    init(_ raw: RawDecided) throws {
        answers = raw.answers.map { Answer(meanLogprob: $0.meanLogprob, probability: $0.p) }
        best = count(raw.best)
        confidence = raw.confidence
        value = raw.value
        usage = Usage(raw.usage)
        provenance = try decoded(raw.provenanceJson)
    }
}
