package import HobUniFFI

/// The name of a pool's entry, shown as `kind:id`.
public struct ResidentKey: Sendable, Hashable, CustomStringConvertible {
    /// `chat`, `embedder` and `reranker` are Hob's own models; any other word is the host's.
    public var kind: String
    /// The name within the kind; of Hob's own models ``ModelInfo/id``.
    public var id: String

    public init(kind: String, id: String) {
        self.kind = kind
        self.id = id
    }

    /// The key of one of Hob's own models.
    public init(_ model: ModelInfo) {
        self.init(kind: model.kind.rawValue, id: model.id)
    }

    public var description: String { "\(kind):\(id)" }

    var raw: RawKey { RawKey(kind: kind, id: id) }

    init(_ raw: RawKey) {
        self.init(kind: raw.kind, id: raw.id)
    }
}

/// What an admission will take.
public enum AdmissionCost: Sendable {
    /// Bytes known beforehand.
    case bytes(Int)
    /// Work that finds the number out; called at most once, and only when a load is needed.
    case estimated(@Sendable () async throws -> Int)
}

/// How an entry is admitted.
public struct AdmissionOptions: Sendable {
    /// The entry's own idle policy, instead of the pool's.
    public var idle: IdleResidencyPolicy?
    /// The policy of the countdown that follows this use only. With `inUse`.
    public var useIdle: IdleResidencyPolicy?
    /// Never evict or sweep the entry.
    public var pinned = false
    /// Begin a use with the admission, without a gap in which the entry could go: ``Admitted/lease``.
    public var inUse = false
    /// Forget an existing entry of the key, without its release, and load anew.
    public var replace = false
    /// What to do without room; nil is the pool's default.
    public var noRoom: NoRoomPolicy?
    /// Stops the resident's work while the pool is paused: starts nothing more, and returns when what runs has ended. Throwing fails the
    /// pause. It must not wait for an admission.
    public var quiesce: (@Sendable () async throws -> Void)?
    /// Undoes ``quiesce``, also of one that threw or was given up half-way. Runs on the thread that ends the pause; must not block.
    public var resume: (@Sendable () -> Void)?
    /// Leaves when cancelled; the task's own cancellation always counts.
    public var cancel: CancelToken?
    /// Leaves after this long, with ``HobError/Kind/timeout``.
    public var timeout: Duration?

    public init(inUse: Bool = false, idle: IdleResidencyPolicy? = nil, pinned: Bool = false, noRoom: NoRoomPolicy? = nil) {
        self.inUse = inUse
        self.idle = idle
        self.pinned = pinned
        self.noRoom = noRoom
    }
}

/// What the load of a host's resident is given.
public struct LoadContext: Sendable {
    let task: RawTask
    /// The admission's token: keep the resident under it. Never used twice by a pool.
    public let token: UInt64

    /// Reports how far the load is, 0 to 1; whole percents become events.
    public func report(_ fraction: Double) {
        try? task.report(fraction: fraction)
    }
}

/// A successful admission.
public struct Admitted: Sendable {
    /// How it was answered.
    public enum Origin: Sendable, Hashable {
        /// The entry was resident.
        case hit
        /// Another caller's load of the same key was under way.
        case joined
        /// This admission loaded it.
        case loaded
    }

    /// The entry's token.
    public var token: UInt64
    /// Hit, join or load.
    public var origin: Origin
    /// How long the load took, whoever ran it.
    public var loadTime: Duration
    /// The use, for an admission `inUse`.
    public var lease: Lease?

    init(_ raw: RawAdmitted) {
        token = raw.token
        origin =
            switch raw.origin {
            case .hit: .hit
            case .joined: .joined
            case .loaded: .loaded
            }
        loadTime = .seconds(raw.loadS)
        lease = raw.lease.map(Lease.init)
    }
}

/// A use of a resident: until ``end()``, or until the last reference goes, the entry is neither evicted nor swept.
public final class Lease: Sendable {
    private let raw: RawLease
    /// Whose use it is.
    public let key: ResidentKey
    /// The token under which the owner keeps the resident.
    public let token: UInt64

    init(_ raw: RawLease) {
        self.raw = raw
        key = (try? raw.key()).map(ResidentKey.init) ?? ResidentKey(kind: "", id: "")
        token = (try? raw.token()) ?? 0
    }

    /// Whether the pool has let the entry go from under the use (a forced evict, a close), or the use has ended.
    public var isDetached: Bool {
        (try? raw.isDetached()) ?? true
    }

    /// Ends the use; whether this call was the one that did. Never waits. Any thread.
    @discardableResult
    public func end() -> Bool {
        (try? raw.end()) ?? false
    }
}

/// New loads are held back until ``resume()``, or until the last reference goes.
public final class Pause: Sendable {
    private let raw: RawPause

    init(_ raw: RawPause) {
        self.raw = raw
    }

    /// The residents whose ``AdmissionOptions/quiesce`` ran, in order; none after the end.
    public var quiesced: [ResidentKey] {
        ((try? raw.quiesced()) ?? []).map(ResidentKey.init)
    }

    /// Lets the waiting admissions go on; whether this call was the one that did. Never waits.
    @discardableResult
    public func resume() -> Bool {
        (try? raw.resume()) ?? false
    }
}

/// Bytes of the host's own on a pool's account, until ``end()`` or until the last reference goes.
public final class Charge: Sendable {
    private let raw: RawCharge

    init(_ raw: RawCharge) {
        self.raw = raw
    }

    /// Bytes on the account for it.
    public var bytes: Int { count((try? raw.bytes()) ?? 0) }

    /// Changes the charge.
    public func set(bytes: Int) throws {
        let bytes = try unsigned(bytes, "the charge")
        try attempt { _ = try raw.set(bytes: bytes) }
    }

    /// Takes the charge off the account.
    public func end() {
        _ = try? raw.end()
    }
}

/// How a pool without an engine is made.
public struct PoolOptions: Sendable {
    /// The budget in bytes, over 0.
    public var budgetBytes: Int
    /// Bytes that are never exceeded, whatever the policy; nil for no such limit.
    public var physicalLimitBytes: Int?
    /// How long entries stay after their last use.
    public var idle: IdleResidencyPolicy
    /// What admissions do without room.
    public var noRoom = NoRoomPolicy.wait
    /// Admissions that may wait for room; one more is ``HobError/Kind/busy``.
    public var maxWaiting = 65_536
    /// Gives freed memory back to the system: after each release and each failed load. It must not wait for an admission.
    public var drain: (@Sendable () async -> Void)?
    /// Without it ``drain`` is not called by itself, and what is cached takes nobody's room.
    public var drainAfterRelease = true
    /// Tells what the process really holds: a floor of the account. Called often, with a lock of the pool held: it must not block, and its
    /// calls of the pool are refused. Reading a few numbers is right.
    public var memory: (@Sendable () -> PoolStatus.Memory)?
    /// How long ``Pool/evict(_:force:)`` at most watches ``memory`` for bytes that come back late.
    public var settle = Duration.milliseconds(250)
    /// Hears of every new budget, one call at a time, the newest last. As with ``memory``, its calls of the pool are refused.
    public var budgetChanged: (@Sendable (Int) -> Void)?
    package var clock: RawFakeClock?

    public init(budgetBytes: Int, idle: IdleResidencyPolicy = .default) {
        self.budgetBytes = budgetBytes
        self.idle = idle
    }
}

/// One memory budget for models and a host's own residents. Nothing is evicted in use. Any task, any thread.
public final class Pool: Sendable {
    let raw: RawPool

    init(raw: RawPool) {
        self.raw = raw
    }

    /// A pool of the host's own, without an engine.
    public init(_ options: PoolOptions) throws {
        let hooks = Hooks(options)
        let options = RawPoolOptions(
            budgetBytes: try unsigned(options.budgetBytes, "the budget"),
            physicalLimitBytes: try options.physicalLimitBytes.map { try unsigned($0, "the physical limit") }, idle: options.idle.raw,
            noRoom: options.noRoom.raw, maxWaiting: try unsigned(options.maxWaiting, "maxWaiting"),
            drainAfterRelease: options.drainAfterRelease, settleS: options.settle.seconds, hooked: hooks.raw, clock: options.clock)
        raw = try attempt { try RawPool.create(options: options, hooks: hooks.isEmpty ? nil : hooks) }
    }

    // MARK: Residents of the host's own

    /// Makes a key of the host's own resident: a hit if it is, a join if somebody is loading it, else a load once there is room.
    ///
    /// `load` runs at most once, when the entries that make room for it are gone. It keeps what it loaded under the context's token and
    /// returns the bytes that it really takes, or nil. Its task is cancelled when nobody waits for it any more; until it ends its bytes
    /// stay reserved. `release` runs at most once, when the entry goes, and lets go of what the token names; it must not wait for an
    /// admission. What either captures goes when it can no longer be called.
    ///
    /// In an engine's pool the kinds `chat`, `embedder` and `reranker` are the engine's own.
    ///
    /// Throws ``HobError/Kind/budgetExceeded``, ``HobError/Kind/busy``, ``HobError/Kind/closed``, ``HobError/Kind/timeout``,
    /// ``HobError/Kind/callback`` when a closure threw (with what it threw as ``HobError/underlying``), or `CancellationError`.
    public func admit(
        _ key: ResidentKey, cost: AdmissionCost, options: AdmissionOptions = AdmissionOptions(),
        load: @escaping @Sendable (LoadContext) async throws -> Int?, release: @escaping @Sendable (UInt64) async throws -> Void
    ) async throws -> Admitted {
        let resident = Resident(cost: cost, options: options, load: load, release: release)
        var bytes: UInt64?
        if case .bytes(let known) = cost { bytes = try unsigned(known, "the cost") }
        do {
            return Admitted(
                try await attempt(cancelledBy: options.cancel) { [bytes] token in
                    try await raw.admit(
                        admission: RawAdmission(
                            key: key.raw, costBytes: bytes, idle: options.idle?.raw, useIdle: options.useIdle?.raw,
                            pinned: options.pinned, inUse: options.inUse, replace: options.replace,
                            quiesces: options.quiesce != nil || options.resume != nil, noRoom: options.noRoom?.raw, cancel: token, timeoutS: options.timeout?.seconds),
                        resident: resident)
                })
        } catch let error as HobError where error.kind == .callback {
            throw HobError(.callback, error.message, underlying: resident.thrown.with { $0 })
        }
    }

    /// Begins a use of a resident entry: while it lasts the entry is neither evicted nor swept. Nil, without any effect, when the pool does
    /// not hold the key. Never waits, never loads. `idle` rules the countdown after this use.
    public func beginUse(_ key: ResidentKey, idle: IdleResidencyPolicy? = nil) throws -> Lease? {
        try attempt { try raw.beginUse(key: key.raw, idle: idle?.raw).map(Lease.init) }
    }

    /// Ends a use; as ``Lease/end()``.
    @discardableResult
    public func endUse(_ lease: Lease) -> Bool {
        lease.end()
    }

    /// The token of a resident entry, without a use.
    public func peek(_ key: ResidentKey) throws -> UInt64? {
        try attempt { try raw.peek(key: key.raw) }
    }

    /// Refreshes an entry's idle clock without a use; whether it is resident.
    @discardableResult
    public func touch(_ key: ResidentKey) throws -> Bool {
        try attempt { try raw.touch(key: key.raw) }
    }

    /// Corrects the charge of the entry admitted under `token`; whether it is resident.
    @discardableResult
    public func setMeasured(token: UInt64, bytes: Int) throws -> Bool {
        let bytes = try unsigned(bytes, "the measured size")
        return try attempt { try raw.setMeasured(token: token, bytes: bytes) }
    }

    /// Puts bytes of the host's own on the account; evicts nothing by itself.
    public func charge(bytes: Int) throws -> Charge {
        let bytes = try unsigned(bytes, "the charge")
        return Charge(try attempt { try raw.charge(bytes: bytes) })
    }

    // MARK: Letting go

    /// Drops an entry without its release: the owner has let go already. The bytes taken off the account; nil when it is not resident.
    @discardableResult
    public func forget(_ key: ResidentKey) throws -> Int? {
        try attempt { try raw.forget(key: key.raw).map(count) }
    }

    /// As ``forget(_:)``, only if the entry is still the one admitted under `token`: who was overtaken forgets nobody else's.
    @discardableResult
    public func forget(token: UInt64) throws -> Int? {
        try attempt { try raw.forgetToken(token: token).map(count) }
    }

    /// As ``forget(_:)``, and gives the memory back: call it after the owner's last reference is gone. The bytes really given back.
    ///
    /// Throws ``HobError/Kind/notFound``. Cancelling the task ends the waiting only.
    @discardableResult
    public func forgetAndDrain(_ key: ResidentKey) async throws -> Int {
        count(try await attempt(cancelledBy: nil) { try await raw.forgetAndDrain(key: key.raw, cancel: $0) })
    }

    /// Unloads an entry: nobody can hit it from now on, then its release runs. The bytes given back.
    ///
    /// `force` also takes an entry in use, whose memory then comes back when its last use ends, and stops a load. Throws
    /// ``HobError/Kind/inUse``, ``HobError/Kind/notFound``, ``HobError/Kind/closed``, or the release's failure (the entry is gone all the
    /// same). Cancelling the task ends the waiting only.
    @discardableResult
    public func evict(_ key: ResidentKey, force: Bool = false) async throws -> Int {
        count(try await attempt(cancelledBy: nil) { try await raw.evict(key: key.raw, force: force, cancel: $0) })
    }

    /// Unloads idle entries, least recently used first, until the account is within the budget.
    @discardableResult
    public func trim() async throws -> Reclaimed {
        try decoded(try await attempt(cancelledBy: nil) { try await raw.trim(cancel: $0) })
    }

    /// Unloads idle entries until `bytes` are free. Reserves nothing, and ends quietly when nothing more can go: ``Reclaimed/fits`` tells.
    @discardableResult
    public func makeRoom(bytes: Int) async throws -> Reclaimed {
        let bytes = try unsigned(bytes, "the room")
        return try decoded(try await attempt(cancelledBy: nil) { try await raw.makeRoom(bytes: bytes, cancel: $0) })
    }

    /// Unloads every entry past its idle time now. The pool does this by itself too.
    @discardableResult
    public func sweep() async throws -> Reclaimed {
        try decoded(try await attempt(cancelledBy: nil) { try await raw.sweep(cancel: $0) })
    }

    // MARK: Marks and limits

    /// Pins an entry: never evicted, never swept; ``evict(_:force:)``, ``forget(_:)`` and a close still work. Whether the pool knows it.
    @discardableResult
    public func pin(_ key: ResidentKey) throws -> Bool {
        try attempt { try raw.pin(key: key.raw) }
    }

    /// Undoes ``pin(_:)``.
    @discardableResult
    public func unpin(_ key: ResidentKey) throws -> Bool {
        try attempt { try raw.unpin(key: key.raw) }
    }

    /// Whether an entry is pinned; nil when the pool does not know it.
    public func isPinned(_ key: ResidentKey) throws -> Bool? {
        try attempt { try raw.isPinned(key: key.raw) }
    }

    /// Changes a resident entry's own idle policy; nil is the pool's. Whether it is resident.
    @discardableResult
    public func setIdle(_ policy: IdleResidencyPolicy?, for key: ResidentKey) throws -> Bool {
        try attempt { try raw.setIdle(key: key.raw, idle: policy?.raw) }
    }

    /// Changes the pool's idle policy, which rules entries without one of their own. What a "Keep model loaded after use" setting calls.
    public func setDefaultIdle(_ policy: IdleResidencyPolicy) throws {
        try attempt { try raw.setDefaultIdle(idle: policy.raw) }
    }

    /// Brings running countdowns forward so that they end within `grace`: for memory pressure. How many.
    @discardableResult
    public func accelerateIdle(grace: Duration) throws -> Int {
        count(try attempt { try raw.accelerateIdle(graceS: grace.seconds) })
    }

    /// Changes the budget. A smaller one evicts nothing by itself: see ``trim()``.
    public func setBudget(bytes: Int) throws {
        let bytes = try unsigned(bytes, "the budget")
        try attempt { try raw.setBudget(bytes: bytes) }
    }

    /// The budget in bytes.
    public var budgetBytes: Int {
        get throws { count(try attempt { try raw.budget() }) }
    }

    // MARK: Looking

    /// What an admission of `key` for `bytes` would do now, changing nothing.
    public func plan(_ key: ResidentKey, bytes: Int, noRoom: NoRoomPolicy? = nil) throws -> Plan {
        let bytes = try unsigned(bytes, "the cost")
        return try decoded(try attempt { try raw.plan(key: key.raw, costBytes: bytes, noRoom: noRoom?.raw) })
    }

    /// Whether so many bytes more could be had now, idle entries given up for them. Changes nothing.
    public func hasRoom(bytes: Int) throws -> Bool {
        let bytes = try unsigned(bytes, "the room")
        return try attempt { try raw.hasRoom(bytes: bytes) }
    }

    /// A snapshot. Never loads, never waits.
    public func status() throws -> PoolStatus {
        try decoded(try attempt { try raw.status() })
    }

    /// What happens from now on, for one reader. At most `capacity` unread events are kept; of more the oldest are lost, and how many is
    /// told.
    public func events(capacity: Int = 256) throws -> PoolEvents {
        let capacity = try unsigned32(capacity, "capacity")
        return PoolEvents(try attempt { try raw.events(capacity: capacity) })
    }

    // MARK: The end

    /// Holds back new loads until the result is resumed or let go of, once loads and releases under way have ended.
    public func pause(cancel: CancelToken? = nil) async throws -> Pause {
        Pause(try await attempt(cancelledBy: cancel) { try await raw.pause(cancel: $0) })
    }

    /// Closes a pool of the host's own: whoever waits gets ``HobError/Kind/closed``, every entry is released. For an engine's pool use
    /// ``Engine/close()``. Closing again is allowed. Cancelling the task ends the waiting only. Throws one error that names every release that
    /// failed.
    public func close() async throws {
        try await attempt(cancelledBy: nil, begins: true) { try await raw.close(cancel: $0) }
    }

    /// Whether the pool is closed or closing.
    public var isClosed: Bool {
        (try? raw.isClosed()) ?? true
    }
}

/// A host's closures, as the library calls them: each begins a task, returns at once, and answers when the task ends.
private final class Resident: RawResident {
    private let cost: AdmissionCost
    private let quiesces: (@Sendable () async throws -> Void)?
    private let resumes: (@Sendable () -> Void)?
    private let loads: @Sendable (LoadContext) async throws -> Int?
    private let releases: @Sendable (UInt64) async throws -> Void
    /// What a closure threw, for the one who asked.
    let thrown = Locked<(any Error)?>(nil)

    init(
        cost: AdmissionCost, options: AdmissionOptions, load: @escaping @Sendable (LoadContext) async throws -> Int?,
        release: @escaping @Sendable (UInt64) async throws -> Void
    ) {
        self.cost = cost
        quiesces = options.quiesce
        resumes = options.resume
        loads = load
        releases = release
    }

    func estimate(task: RawTask) {
        guard case .estimated(let estimate) = cost else { return }
        follow(task, answer(task, "the estimate") { try await estimate() })
    }

    func load(task: RawTask) {
        let loads = loads
        let token = (try? task.token()) ?? 0
        follow(task, answer(task, "the load") { try await loads(LoadContext(task: task, token: token)) })
    }

    func quiesce(task: RawTask) {
        let quiesces = quiesces
        let work = answer(task, "the quiesce") {
            try await quiesces?()
            return nil
        }
        follow(task, work)
    }

    func resume() {
        resumes?()
    }

    /// Cancels the closure's task when nobody waits for it any more.
    private func follow(_ task: RawTask, _ work: Task<Void, Never>) {
        Task {
            if (try? await task.cancelled()) == true { work.cancel() }
        }
    }

    func release(task: RawTask) {
        let releases = releases
        let token = (try? task.token()) ?? 0
        answer(task, "the release") {
            try await releases(token)
            return nil
        }
    }

    @discardableResult
    private func answer(_ task: RawTask, _ what: String, _ closure: @escaping @Sendable () async throws -> Int?) -> Task<Void, Never> {
        let thrown = thrown
        return Task {
            do {
                let bytes = try await closure().map { try unsigned($0, "what \(what) returned") }
                _ = try task.finish(bytes: bytes)
            } catch {
                thrown.with { $0 = error }
                // Its type only: its words may hold anything, and the admission's own caller gets the error itself.
                _ = try? task.fail(message: "\(what) closure threw \(type(of: error))", cancelled: error is CancellationError)
            }
        }
    }
}

/// A host's part in a pool of its own, as the library calls it.
private final class Hooks: RawHooks {
    private let drains: (@Sendable () async -> Void)?
    private let measures: (@Sendable () -> PoolStatus.Memory)?
    private let hears: (@Sendable (Int) -> Void)?

    init(_ options: PoolOptions) {
        drains = options.drain
        measures = options.memory
        hears = options.budgetChanged
    }

    var raw: RawHooked { RawHooked(drain: drains != nil, budget: hears != nil, memory: measures != nil) }
    var isEmpty: Bool { drains == nil && measures == nil && hears == nil }

    func drain(task: RawTask) {
        let drains = drains
        Task {
            await drains?()
            _ = try? task.finish(bytes: nil)
        }
    }

    func budgetChanged(bytes: UInt64) {
        hears?(count(bytes))
    }

    func memory() -> RawMemory {
        let memory = measures?() ?? PoolStatus.Memory(active: 0)
        return RawMemory(
            active: UInt64(clamping: memory.active), cache: UInt64(clamping: memory.cache), peak: UInt64(clamping: memory.peak),
            available: memory.available.map { UInt64(clamping: $0) })
    }
}
