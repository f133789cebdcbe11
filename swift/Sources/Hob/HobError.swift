import Foundation
internal import HobUniFFI

/// Hob's error: a kind that a program can act on, and one line for people that names the value and the knob that would change the outcome.
///
/// A `Task` that was cancelled gets Swift's own `CancellationError` instead; ``Kind/cancelled`` means that a ``CancelToken`` was cancelled,
/// or that a model was evicted by force while it loaded. Messages never contain a user's text.
public struct HobError: Error, Sendable, CustomStringConvertible {
    /// What went wrong, as far as a program would act differently.
    public enum Kind: Int32, Sendable, CaseIterable, CustomStringConvertible {
        /// An argument or option has a value that is never valid.
        case invalidArgument = -1
        /// The model, entry or file named does not exist.
        case notFound = -2
        /// Reading or writing failed in the operating system.
        case io = -3
        /// A model's files are damaged, inconsistent or hostile.
        case badModel = -4
        /// The request is valid but this model, device or build cannot do it.
        case unsupported = -5
        /// The device could not provide memory that the budget allowed.
        case outOfMemory = -6
        /// The pool's budget has no room. Raise the budget, evict, or wait.
        case budgetExceeded = -7
        /// A bounded queue is full, somebody else is at it, or the device is not accepting work now. Try again later.
        case busy = -8
        /// A deadline passed.
        case timeout = -9
        /// The caller cancelled.
        case cancelled = -10
        /// A closure of the host's failed; ``HobError/underlying`` is what it threw.
        case callback = -11
        /// A caller's buffer is too small.
        case bufferTooSmall = -12
        /// The engine, pool or stream was closed.
        case closed = -13
        /// MLX reported a failure.
        case backend = -14
        /// A fault in Hob itself.
        case `internal` = -15
        /// The entry is in use and the call did not force.
        case inUse = -16

        public var description: String { "\(name)" }

        private var name: String {
            switch self {
            case .invalidArgument: "InvalidArgument"
            case .notFound: "NotFound"
            case .io: "Io"
            case .badModel: "BadModel"
            case .unsupported: "Unsupported"
            case .outOfMemory: "OutOfMemory"
            case .budgetExceeded: "BudgetExceeded"
            case .busy: "Busy"
            case .timeout: "Timeout"
            case .cancelled: "Cancelled"
            case .callback: "Callback"
            case .bufferTooSmall: "BufferTooSmall"
            case .closed: "Closed"
            case .backend: "Backend"
            case .internal: "Internal"
            case .inUse: "InUse"
            }
        }
    }

    /// What went wrong.
    public let kind: Kind
    /// One line for people, with the chain of causes.
    public let message: String
    /// What a closure of the host's threw, for ``Kind/callback`` of the admission whose closure it was.
    public let underlying: (any Error)?

    /// An error of a host's own making, for example in a test's stand-in.
    public init(_ kind: Kind, _ message: String, underlying: (any Error)? = nil) {
        self.kind = kind
        self.message = message
        self.underlying = underlying
    }

    public var description: String { "\(kind): \(message)" }
}

extension HobError: LocalizedError, CustomNSError {
    /// ``message``: what an alert shows.
    public var errorDescription: String? { message }
    public static var errorDomain: String { "Hob" }
    /// The kind's frozen code.
    public var errorCode: Int { Int(kind.rawValue) }
    public var errorUserInfo: [String: Any] { [NSLocalizedDescriptionKey: message] }
}

/// What the generated module threw, as Hob throws it.
func hobError(_ error: any Error) -> any Error {
    switch error {
    case is HobError, is CancellationError:
        return error
    case RawError.Failed(let code, let message):
        let kind = HobError.Kind(rawValue: code) ?? .internal
        return kind == .cancelled && Task.isCancelled ? CancellationError() : HobError(kind, message)
    default:
        // A panic that was caught at the border, or a value that does not cross it.
        return HobError(.internal, "the border to the library failed: \(error)")
    }
}

/// Runs a call of the generated module.
package func attempt<T>(_ call: () throws -> T) throws -> T {
    do { return try call() } catch { throw hobError(error) }
}

/// Runs an asynchronous call of the generated module, which nothing but its own end ends.
package func attempt<T>(_ call: () async throws -> T) async throws -> T {
    do { return try await call() } catch { throw hobError(error) }
}

/// Runs an asynchronous call of the generated module, which ends when this task or `token` is cancelled. One that `begins` anyhow is begun
/// in a cancelled task too: it is the end of something, and only the waiting for it ends.
func attempt<T>(
    cancelledBy token: CancelToken?, begins: Bool = false, _ call: (RawCancelToken) async throws -> T
) async throws -> T {
    do {
        if !begins { try Task.checkCancellation() }
        let raw = try token?.raw.child() ?? RawCancelToken.create()
        return try await withTaskCancellationHandler {
            try await call(raw)
        } onCancel: {
            _ = try? raw.cancel()
        }
    } catch {
        throw hobError(error)
    }
}
