/// How long a model stays in memory after its last use.
///
/// The countdown begins when the last use ends (of a stream: with its end), or at the load of a model that nobody has used yet. In JSON:
/// `{"mode":"immediately"}`, `{"mode":"after_seconds","seconds":900}`, `{"mode":"never"}`. Reading never fails, so that a settings file of
/// another version does no harm: seconds are clamped, 0 seconds means ``immediately``, and whatever is malformed or unknown is
/// ``default``.
public enum IdleResidencyPolicy: Hashable, Sendable {
    /// As soon as the last use ends. A model that was loaded ahead of its first use waits for that use.
    case immediately
    /// So many seconds after the last use, clamped to ``secondsRange``; 0 is ``immediately``.
    case afterSeconds(Int)
    /// Until it is evicted, by name or for room.
    case never

    /// 900 seconds.
    public static let `default`: IdleResidencyPolicy = .afterSeconds(900)
    /// What ``afterSeconds(_:)`` is clamped to: half a minute to a day.
    public static let secondsRange = 30...86_400
    /// Choices for a picker: immediately, 5, 15, 30 and 60 minutes, never.
    public static let presets: [IdleResidencyPolicy] = [
        .immediately, .afterSeconds(300), .afterSeconds(900), .afterSeconds(1800), .afterSeconds(3600), .never,
    ]

    /// The same policy in its canonical form.
    public var normalized: IdleResidencyPolicy {
        switch self {
        case .afterSeconds(0): .immediately
        case .afterSeconds(let seconds):
            .afterSeconds(min(max(seconds, Self.secondsRange.lowerBound), Self.secondsRange.upperBound))
        default: self
        }
    }
}

extension IdleResidencyPolicy: Codable {
    private enum Key: String, CodingKey {
        case mode, seconds
    }

    public init(from decoder: any Decoder) {
        self = (try? decoder.container(keyedBy: Key.self)).flatMap(Self.read) ?? .default
    }

    private static func read(_ fields: KeyedDecodingContainer<Key>) -> Self? {
        switch try? fields.decode(String.self, forKey: .mode) {
        case "immediately": return .immediately
        case "never": return .never
        case "after_seconds":
            // Other languages write 900.0; a fraction of a second has no meaning here and is cut.
            guard let seconds = try? fields.decode(Double.self, forKey: .seconds), seconds.isFinite, seconds >= 0 else { return nil }
            return Self.afterSeconds(Int(min(seconds, Double(secondsRange.upperBound)))).normalized
        default: return nil
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: Key.self)
        switch normalized {
        case .immediately: try fields.encode("immediately", forKey: .mode)
        case .never: try fields.encode("never", forKey: .mode)
        case .afterSeconds(let seconds):
            try fields.encode("after_seconds", forKey: .mode)
            try fields.encode(seconds, forKey: .seconds)
        }
    }
}
