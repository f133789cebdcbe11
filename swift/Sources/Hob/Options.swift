package import HobUniFFI

/// Asks work to stop: from any thread, at any time, once. Cancelling a `Task` does the same for the calls that it awaits; a token is for
/// work that several tasks share, and for deadlines.
public final class CancelToken: Sendable {
    package let raw: RawCancelToken

    /// A live token.
    public init() throws {
        raw = try attempt { try RawCancelToken.create() }
    }

    private init(raw: RawCancelToken) {
        self.raw = raw
    }

    /// A token that is cancelled when this one is, and can be cancelled alone.
    public func child() throws -> CancelToken {
        CancelToken(raw: try attempt { try raw.child() })
    }

    /// A child that is cancelled by itself after `timeout`; work then ends with ``HobError/Kind/timeout``.
    public func child(timeout: Duration) throws -> CancelToken {
        CancelToken(raw: try attempt { try raw.withTimeout(seconds: timeout.seconds) })
    }

    /// Cancels this token and its descendants.
    public func cancel() {
        _ = try? raw.cancel()
    }

    /// Whether the token is cancelled or its time is up.
    public var isCancelled: Bool { reason != nil }

    /// The kind of error that work under the token ends with: ``HobError/Kind/cancelled`` or ``HobError/Kind/timeout``; nil while it is live.
    public var reason: HobError.Kind? {
        ((try? raw.reason()) ?? nil).flatMap(HobError.Kind.init)
    }
}

/// What an admission does when there is no room even after every idle entry would go.
public enum NoRoomPolicy: Sendable, Hashable, CaseIterable {
    /// Wait in line until uses end; with nothing but pinned entries in the way, be served beside them.
    case wait
    /// Fail with ``HobError/Kind/budgetExceeded``.
    case refuse
    /// Evict what is idle and load over the budget, never over the physical limit.
    case loadAnyway

    package var raw: RawNoRoom {
        switch self {
        case .wait: .wait
        case .refuse: .refuse
        case .loadAnyway: .loadAnyway
        }
    }
}

/// What a model is for.
public enum ModelKind: String, Sendable, Hashable, Codable, CaseIterable {
    /// Generates text.
    case chat
    /// Turns texts into vectors.
    case embedder
    /// Scores documents against a query.
    case reranker

    package var raw: RawModelKind {
        switch self {
        case .chat: .chat
        case .embedder: .embedder
        case .reranker: .reranker
        }
    }
}

/// A number type to compute in.
public enum FloatType: String, Sendable, Hashable, CaseIterable {
    case float32, float16, bfloat16

    var raw: RawFloat {
        switch self {
        case .float32: .float32
        case .float16: .float16
        case .bfloat16: .bfloat16
        }
    }
}

/// How an embedder's token states become one vector.
public enum Pooling: String, Sendable, Hashable, CaseIterable {
    case cls, max, mean, lastToken

    var raw: RawPooling {
        switch self {
        case .cls: .cls
        case .max: .max
        case .mean: .mean
        case .lastToken: .lastToken
        }
    }
}

/// What happens to a text that is longer than the model allows.
public enum Truncation: Sendable, Hashable, CaseIterable {
    /// It is refused, with both numbers.
    case error
    /// Its end is cut, and how many tokens went is reported.
    case end
    /// Its start is cut. For prompts only.
    case start

    var raw: RawTruncate {
        switch self {
        case .error: .error
        case .end: .end
        case .start: .start
        }
    }
}

/// How a model is loaded if it is not resident. The first load decides.
public struct LoadOptions: Sendable, Hashable {
    /// What the model is used as; nil asks its files.
    public var kind: ModelKind?
    /// The number type to compute in; nil takes the files' own, and float32 on a CPU.
    public var float: FloatType?
    /// Expand quantised weights at load; nil does so on a CPU only.
    public var dequantize: Bool?
    /// How token states become one vector; nil asks the files.
    public var pooling: Pooling?
    /// What the files must be, checked before they are loaded: a manifest's JSON.
    public var manifestJSON: String?

    public init(
        kind: ModelKind? = nil, float: FloatType? = nil, dequantize: Bool? = nil, pooling: Pooling? = nil, manifestJSON: String? = nil
    ) {
        self.kind = kind
        self.float = float
        self.dequantize = dequantize
        self.pooling = pooling
        self.manifestJSON = manifestJSON
    }

    var raw: RawLoadOptions {
        RawLoadOptions(kind: kind?.raw, float: float?.raw, dequantize: dequantize, pooling: pooling?.raw, manifestJson: manifestJSON)
    }
}

/// What every request has: when to give up, and how its model is loaded and kept.
public struct RequestOptions: Sendable {
    /// Gives up when cancelled, in any phase: waiting for room, loading, computing. The task's own cancellation always counts.
    public var cancel: CancelToken?
    /// Gives up after this long, with ``HobError/Kind/timeout``.
    public var timeout: Duration?
    /// A cancelled or timed-out generation ends with what there is, instead of an error.
    public var stopsOnCancel: Bool
    /// How the model is loaded if it is not resident.
    public var load: LoadOptions
    /// How long the model stays after this use; nil is its own policy or the pool's.
    public var idle: IdleResidencyPolicy?
    /// The model's own policy from now on; the last one given wins.
    public var modelIdle: IdleResidencyPolicy?
    /// Keep the model whatever happens, until it is unpinned, evicted by name, or the engine closes.
    public var pinned: Bool

    public init(
        cancel: CancelToken? = nil, timeout: Duration? = nil, stopsOnCancel: Bool = false, load: LoadOptions = LoadOptions(),
        idle: IdleResidencyPolicy? = nil, modelIdle: IdleResidencyPolicy? = nil, pinned: Bool = false
    ) {
        self.cancel = cancel
        self.timeout = timeout
        self.stopsOnCancel = stopsOnCancel
        self.load = load
        self.idle = idle
        self.modelIdle = modelIdle
        self.pinned = pinned
    }

    func raw(_ token: RawCancelToken?) -> RawRequestOptions {
        RawRequestOptions(
            cancel: token, timeoutS: timeout?.seconds, stopOnCancel: stopsOnCancel, load: load.raw, idle: idle?.raw,
            modelIdle: modelIdle?.raw, pinned: pinned)
    }
}

extension IdleResidencyPolicy {
    package var raw: RawIdle {
        switch normalized {
        case .immediately: .immediately
        case .afterSeconds(let seconds): .afterSeconds(seconds: UInt32(seconds))
        case .never: .never
        }
    }
}

/// How much one request may bring. Checked before anything is queued or loaded; a request over a limit is
/// ``HobError/Kind/invalidArgument``.
public struct Limits: Sendable, Hashable, Encodable {
    /// Bytes of one prompt or conversation. Default 16 MiB.
    public var promptBytes = 16 << 20
    /// Messages of one conversation. Default 10,000.
    public var messages = 10_000
    /// Tools of one request. Default 1,000.
    public var tools = 1_000
    /// Bytes of each text to embed or rank. Default 1 MiB.
    public var textBytes = 1 << 20
    /// Texts of one request. Default 10,000.
    public var texts = 10_000
    /// Bytes of all of them together. Default 64 MiB.
    public var totalBytes = 64 << 20
    /// Stop strings of one request. Default 64, which is also the most there can be.
    public var stops = 64
    /// Bytes of each stop string. Default 4,096, which is also the most there can be.
    public var stopBytes = 4_096
    /// Bytes of one call of a tool in an answer; a longer one is ``RejectedCall/Reason/tooLarge``. Default 1 MiB.
    public var callBytes = 1 << 20
    /// The longest timeout that a request may ask for; one without a timeout is not affected. Default 24 hours.
    public var timeout = Duration.seconds(86_400)

    public init() {}

    private enum CodingKeys: String, CodingKey {
        case promptBytes = "prompt_bytes"
        case messages, tools, texts
        case textBytes = "text_bytes"
        case totalBytes = "total_bytes"
        case stops
        case stopBytes = "stop_bytes"
        case callBytes = "call_bytes"
        case timeout
    }

    private enum TimeKeys: String, CodingKey {
        case secs, nanos
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: CodingKeys.self)
        for (value, key) in numbers { try fields.encode(value, forKey: key) }
        var time = fields.nestedContainer(keyedBy: TimeKeys.self, forKey: .timeout)
        let (seconds, attoseconds) = timeout.components
        try time.encode(seconds, forKey: .secs)
        try time.encode(attoseconds / 1_000_000_000, forKey: .nanos)
    }

    private var numbers: [(Int, CodingKeys)] {
        [
            (promptBytes, .promptBytes), (messages, .messages), (tools, .tools), (textBytes, .textBytes), (texts, .texts),
            (totalBytes, .totalBytes), (stops, .stops), (stopBytes, .stopBytes), (callBytes, .callBytes),
        ]
    }

    /// As the library reads them. An error names the limit and its value.
    func json() throws -> String {
        for (value, key) in numbers { _ = try unsigned(value, "the limit \(key.rawValue)") }
        guard timeout >= .zero else { throw HobError(.invalidArgument, "the limit timeout is \(timeout); it must be 0 or more") }
        return try encoded(self, as: "limits")
    }
}

/// How an engine is made.
public struct EngineOptions: Sendable {
    /// The pool's budget in bytes; nil is 70 % of what the device recommends, else of three quarters of the memory.
    public var budgetBytes: Int?
    /// How long models stay after their last use. Default: 900 s.
    public var idle = IdleResidencyPolicy.default
    /// What a request does while there is no room for its model. Default: it waits.
    public var noRoom = NoRoomPolicy.wait
    /// Generations of one model that run at once, in one batch. Default 8.
    public var capacity = 8
    /// Requests that may wait beyond `capacity`; one more is ``HobError/Kind/busy``. Default 64.
    public var queue = 64
    /// Bytes of computed prompts kept for later ones, within the budget. Default 512 MiB.
    public var promptCacheBytes = 512 << 20
    /// How long the device may stay at one piece of given-up work before new requests are refused. Default 30 s.
    public var stuckAfter = Duration.seconds(30)
    /// How long ``Engine/close()`` waits. Default 120 s.
    public var closeTimeout = Duration.seconds(120)
    /// How much one request may bring.
    public var limits = Limits()
    /// Give freed memory back to the system each time a model goes. Default true.
    public var drainAfterRelease = true
    package var clock: RawFakeClock?

    public init(budgetBytes: Int? = nil, idle: IdleResidencyPolicy = .default) {
        self.budgetBytes = budgetBytes
        self.idle = idle
    }

    package func raw() throws -> RawEngineOptions {
        RawEngineOptions(
            budgetBytes: try budgetBytes.map { try unsigned($0, "the budget") }, idle: idle.raw, noRoom: noRoom.raw,
            capacity: try unsigned32(capacity, "capacity"), queue: try unsigned32(queue, "queue"),
            promptCacheBytes: try unsigned(promptCacheBytes, "promptCacheBytes"), stuckAfterS: stuckAfter.seconds,
            closeTimeoutS: closeTimeout.seconds, limitsJson: try limits.json(), drainAfterRelease: drainAfterRelease,
            clock: clock)
    }
}
