import Hob
package import HobUniFFI

/// A model of a ``FakeDevice``. Its tokens are bytes.
public struct FakeModel: Sendable, Hashable {
    /// The reference by which requests name it.
    public var name: String
    /// What it is for.
    public var kind: ModelKind
    /// Bytes that it takes, estimated and real.
    public var bytes: Int
    /// What a chat model answers, whatever it is asked.
    public var reply: String
    /// Tokens that it can attend to.
    public var context = 4096
    /// Width of an embedder's vectors.
    public var dimensions = 8
    /// A chat model answers with its own rendered prompt, instead of `reply`.
    public var echo = false
    /// The chat template; nil is one line per message. Answers are read by the marks it holds.
    public var template: String?

    public init(_ name: String, _ kind: ModelKind, bytes: Int = 100, reply: String = "Hello!") {
        self.name = name
        self.kind = kind
        self.bytes = bytes
        self.reply = reply
    }
}

/// A device that does what a test tells it: a host's handling of slow loads, full pools and failures needs no model and no time.
public final class FakeDevice: Sendable {
    /// A place where the device can be told to wait or to fail.
    public enum Point: Sendable, Hashable, CaseIterable {
        case load, loadEnd, loadStep, prefill, step, score, embed, rerank, unload, drain

        var raw: RawPoint {
            switch self {
            case .load: .load
            case .loadEnd: .loadEnd
            case .loadStep: .loadStep
            case .prefill: .prefill
            case .step: .step
            case .score: .score
            case .embed: .embed
            case .rerank: .rerank
            case .unload: .unload
            case .drain: .drain
            }
        }
    }

    package let raw: RawFakeDevice

    /// A device that knows these models.
    public init(_ models: [FakeModel]) throws {
        let models = models.map { model in
            RawFakeModel(
                name: model.name, kind: model.kind.raw, bytes: UInt64(clamping: model.bytes), reply: model.reply,
                context: UInt64(clamping: model.context), dimensions: UInt64(clamping: model.dimensions), echo: model.echo,
                template: model.template)
        }
        raw = try attempt { try RawFakeDevice.create(models: models) }
    }

    /// Opens an engine on it. Everything else is as with ``Engine/open(_:)``; `clock` moves its timers.
    public func openEngine(_ options: EngineOptions = EngineOptions(), clock: FakeClock? = nil) async throws -> Engine {
        var options = options
        options.clock = clock?.raw
        let given = try options.raw()
        return try Engine(raw: try await attempt { try await RawEngine.openFake(device: raw, options: given) })
    }

    /// The device waits at `point` from now on.
    public func hold(_ point: Point) throws { try attempt { try raw.hold(point: point.raw) } }
    /// The device goes on from `point`.
    public func release(_ point: Point) throws { try attempt { try raw.release(point: point.raw) } }
    /// The device goes on from a held `point` once, and waits again at the next arrival.
    public func pass(_ point: Point) throws { try attempt { try raw.pass(point: point.raw) } }
    /// Returns when the device waits at a held `point`.
    public func waitUntilHeld(_ point: Point) async throws {
        try await attempt { try await raw.waitUntilHeld(point: point.raw) }
    }
    /// How the device goes wrong.
    public enum Fault: Sendable, Hashable, CaseIterable {
        /// With ``HobError/Kind/backend``.
        case backend
        /// With ``HobError/Kind/outOfMemory``.
        case outOfMemory
        /// By a panic inside the engine, which a host sees as ``HobError/Kind/internal``.
        case panic

        var raw: RawFault {
            switch self {
            case .backend: .backend
            case .outOfMemory: .outOfMemory
            case .panic: .panic
            }
        }
    }

    /// The next arrival at `point` goes wrong.
    public func failNext(_ point: Point, with fault: Fault = .backend) throws {
        try attempt { try raw.failNext(point: point.raw, fault: fault.raw) }
    }
    /// How often the device came to `point`.
    public func count(_ point: Point) throws -> Int { Int(clamping: try attempt { try raw.count(point: point.raw) }) }
    /// Bytes that the device holds.
    public var heldBytes: Int { get throws { Int(clamping: try attempt { try raw.heldBytes() }) } }
}

/// A clock that a test moves. It stands still until then.
public final class FakeClock: Sendable {
    package let raw: RawFakeClock

    public init() throws {
        raw = try attempt { try RawFakeClock.create() }
    }

    /// Moves it.
    public func advance(by duration: Duration) throws {
        let (seconds, attoseconds) = duration.components
        try attempt { try raw.advance(seconds: Double(seconds) + Double(attoseconds) * 1e-18) }
    }

    /// Timers that wait on it.
    public var sleepers: Int { get throws { Int(clamping: try attempt { try raw.sleepers() }) } }
}

extension Pool {
    /// A pool of the host's own whose idle timers follow a test's clock.
    public convenience init(_ options: PoolOptions, clock: FakeClock) throws {
        var options = options
        options.clock = clock.raw
        try self.init(options)
    }
}

/// Reads a whole generation as a Rust program does, without Swift in between; how many tokens came. For benchmarks.
package func readInRust(_ engine: Engine, model: String, prompt: String) async throws -> UInt64 {
    try await attempt { try await rawReadInRust(engine: engine.raw, model: model, prompt: prompt) }
}

/// Handles of the library that this process holds now, by type; those of the C ABI together as `c`. All are 0 once everything is let go of.
public func liveHandles() throws -> [String: Int] {
    try attempt { try rawLiveHandles() }.mapValues { Int($0) }
}
