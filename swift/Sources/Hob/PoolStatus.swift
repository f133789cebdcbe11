internal import HobUniFFI

extension ResidentKey: Decodable {
    /// From `kind:id`.
    public init(from decoder: any Decoder) throws {
        let text = try decoder.singleValueContainer().decode(String.self)
        let parts = text.split(separator: ":", maxSplits: 1, omittingEmptySubsequences: false)
        self.init(kind: String(parts[0]), id: parts.count > 1 ? String(parts[1]) : "")
    }
}

/// A snapshot of a pool. Sizes are bytes.
public struct PoolStatus: Sendable, Hashable, Decodable {
    /// The budget.
    public var budgetBytes: Int
    /// The physical limit.
    public var physicalLimitBytes: Int?
    /// Of resident entries.
    public var residentBytes: Int
    /// Reserved by loads under way.
    public var pendingBytes: Int
    /// Of entries that are on their way out.
    public var releasingBytes: Int
    /// Charged by the host.
    public var externalBytes: Int
    /// The sum of the four.
    public var usedBytes: Int
    /// The highest sum so far.
    public var peakUsedBytes: Int
    /// What an admission could take without evicting anything.
    public var freeBytes: Int
    /// Admissions standing in line.
    public var waiting: Int
    /// Whether new loads are held back.
    public var paused: Bool
    /// Whether the pool is closed or closing.
    public var closed: Bool
    /// Every entry, sorted by key, then token.
    public var entries: [Entry]
    /// Counters since the pool was made.
    public var counters: Counters
    /// Real memory of the process on the device, when the pool can tell.
    public var memory: Memory?

    /// One entry.
    public struct Entry: Sendable, Hashable, Decodable, Identifiable {
        /// Where it is in its life.
        public enum State: String, Sendable, Hashable, Decodable {
            /// Its admission stands in line.
            case waiting
            /// Its bytes are reserved: room is being made, then it loads.
            case loading
            /// Resident.
            case ready
            /// On its way out.
            case draining
        }

        public var key: ResidentKey
        /// The admission's token.
        public var token: UInt64
        public var state: State
        /// On the account for it now.
        public var bytes: Int
        public var estimatedBytes: Int?
        public var measuredBytes: Int?
        public var pinned: Bool
        /// Uses now; of a load: callers waiting for it.
        public var uses: Int
        /// Milliseconds since its last use ended, or since its load; 0 while in use.
        public var idleMs: Int
        /// The idle policy that rules now.
        public var idle: IdleResidencyPolicy
        /// Milliseconds until it is unloaded for idleness; nil while no countdown runs.
        public var unloadInMs: Int?
        /// How far its load is, 0 to 1.
        public var progress: Double?
        public var loads: Int
        public var unloads: Int
        public var lastLoadMs: Int?

        public var id: UInt64 { token }
    }

    public struct Counters: Sendable, Hashable, Decodable {
        /// Uses and admissions answered by a resident entry.
        public var hits: Int
        /// Admissions that joined another's load.
        public var joins: Int
        public var loads: Int
        public var failedLoads: Int
        /// Entries unloaded for room.
        public var evictions: Int
        /// Entries unloaded for idleness.
        public var idleUnloads: Int
        public var failedReleases: Int
        /// Admissions that had to stand in line.
        public var waits: Int
        public var refusals: Int
        /// Callers who left before their answer.
        public var left: Int
        public var unbalancedEnds: Int
    }

    public struct Memory: Sendable, Hashable, Decodable {
        /// Held by live arrays.
        public var active: Int
        /// Freed by arrays, not yet given back to the system.
        public var cache: Int
        /// The highest `active` so far.
        public var peak: Int
        /// What the system could still give, when it says.
        public var available: Int?

        /// A reading of a host's own, for ``PoolOptions/memory``.
        public init(active: Int, cache: Int = 0, peak: Int = 0, available: Int? = nil) {
            self.active = active
            self.cache = cache
            self.peak = peak
            self.available = available
        }
    }

    /// The entry of `key` that can be used or is on its way in; else the one on its way out.
    public subscript(key: ResidentKey) -> Entry? {
        entries.first { $0.key == key && $0.state != .draining } ?? entries.first { $0.key == key }
    }
}

/// A dry run of an admission.
public struct Plan: Sendable, Hashable, Decodable {
    public enum Verdict: String, Sendable, Hashable, Decodable {
        /// Already resident.
        case resident
        /// Already being loaded or waiting for room.
        case loading
        /// Fits beside everything.
        case fits
        /// Fits once ``Plan/evict`` are gone.
        case evicts
        /// Would be served alone, over the budget.
        case alone
        /// Would wait for uses or loads to end.
        case waits
        /// Would be refused.
        case refused
    }

    public var verdict: Verdict
    /// Whether it could load now within the budget.
    public var fits: Bool
    /// What would be charged; 0 for a resident or loading key.
    public var requiredBytes: Int
    /// Free now.
    public var freeBytes: Int
    /// Who would go, least recently used first.
    public var evict: [ResidentKey]
}

/// What `trim`, `makeRoom` and `sweep` did.
public struct Reclaimed: Sendable, Decodable {
    /// Who went, in order.
    public var evicted: [ResidentKey]
    /// Bytes given back.
    public var freedBytes: Int
    /// Whether the goal was reached (of `sweep`: always).
    public var fits: Bool
    /// Releases that failed; their entries are gone all the same.
    public var failures: [HobError]
}

extension HobError: Decodable {
    private enum Key: CodingKey {
        case code, message
    }

    /// From the library's `{"code", "message"}`.
    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Key.self)
        self.init(Kind(rawValue: try fields.decode(Int32.self, forKey: .code)) ?? .internal, try fields.decode(String.self, forKey: .message))
    }
}

/// Something that happened in a pool.
public enum PoolEvent: Sendable, Hashable {
    /// An admission stands in line behind `ahead` others.
    case waiting(ResidentKey, bytes: Int, ahead: Int)
    /// An admission was refused or failed before its load; `kind` as ``HobError/Kind`` describes itself.
    case refused(ResidentKey, bytes: Int, kind: String)
    /// A load starts; what made room for it is gone.
    case loadStarted(ResidentKey, token: UInt64, bytes: Int)
    case loadProgress(ResidentKey, token: UInt64, percent: Int)
    case loaded(ResidentKey, token: UInt64, bytes: Int, milliseconds: Int)
    case loadFailed(ResidentKey, token: UInt64, kind: String)
    /// Nobody can hit the entry any more. `reason`: `evicted`, `idle`, `requested`, `forgotten`, `replaced`, `closed`.
    case unloadStarted(ResidentKey, token: UInt64, reason: String)
    /// An entry's memory is back.
    case unloaded(ResidentKey, token: UInt64, reason: String, bytes: Int)
    case releaseFailed(ResidentKey, token: UInt64, kind: String)
    case budgetChanged(bytes: Int)
    case paused
    case resumed
    /// The pool is closed; no event follows.
    case closed
    /// The reader was too slow: so many of the oldest events were lost.
    case missed(Int)
    /// An event of a later version.
    case unknown(String)

    init(json: String) throws {
        let fields: Fields = try decoded(json)
        func key() throws -> ResidentKey {
            guard let key = fields.key else { throw HobError(.internal, "an event without its key") }
            return key
        }
        let (bytes, token) = (fields.bytes ?? 0, fields.token ?? 0)
        switch fields.event {
        case nil: self = .missed(fields.missed ?? 0)
        case "waiting": self = .waiting(try key(), bytes: bytes, ahead: fields.ahead ?? 0)
        case "refused": self = .refused(try key(), bytes: bytes, kind: fields.kind ?? "")
        case "load_started": self = .loadStarted(try key(), token: token, bytes: bytes)
        case "load_progress": self = .loadProgress(try key(), token: token, percent: fields.percent ?? 0)
        case "loaded": self = .loaded(try key(), token: token, bytes: bytes, milliseconds: fields.ms ?? 0)
        case "load_failed": self = .loadFailed(try key(), token: token, kind: fields.kind ?? "")
        case "unload_started": self = .unloadStarted(try key(), token: token, reason: fields.reason ?? "")
        case "unloaded": self = .unloaded(try key(), token: token, reason: fields.reason ?? "", bytes: bytes)
        case "release_failed": self = .releaseFailed(try key(), token: token, kind: fields.kind ?? "")
        case "budget_changed": self = .budgetChanged(bytes: bytes)
        case "paused": self = .paused
        case "resumed": self = .resumed
        case "closed": self = .closed
        case let event?: self = .unknown(event)
        }
    }

    private struct Fields: Decodable {
        var event: String?
        var key: ResidentKey?
        var token: UInt64?
        var bytes: Int?
        var ahead: Int?
        var percent: Int?
        var ms: Int?
        var kind: String?
        var reason: String?
        var missed: Int?
    }
}

/// What happens in a pool, for one reader. Ends after ``PoolEvent/closed``, or when the reading task is cancelled.
public struct PoolEvents: AsyncSequence, Sendable {
    public typealias Element = PoolEvent

    private let raw: RawEvents

    init(_ raw: RawEvents) {
        self.raw = raw
    }

    public func makeAsyncIterator() -> Iterator {
        Iterator(raw: raw)
    }

    public struct Iterator: AsyncIteratorProtocol {
        fileprivate let raw: RawEvents

        /// The next event; nil after the last one, and when this task is cancelled. Throws ``HobError/Kind/busy`` while another task reads.
        public mutating func next() async throws -> PoolEvent? {
            do {
                let json = try await attempt(cancelledBy: nil) { [raw] in try await raw.next(cancel: $0) }
                return try json.map { try PoolEvent(json: $0) }
            } catch is CancellationError {
                return nil
            }
        }
    }
}
