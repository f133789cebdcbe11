import Foundation

/// A value behind a lock that is held for a moment only.
final class Locked<Value>: @unchecked Sendable {
    // Unchecked: every access to `value` is inside `lock`.
    private let lock = NSLock()
    private var value: Value

    init(_ value: sending Value) {
        self.value = value
    }

    func with<T>(_ change: (inout Value) throws -> T) rethrows -> T {
        lock.lock()
        defer { lock.unlock() }
        return try change(&value)
    }
}

/// A value of JSON: arguments of a tool, its schema, variables of a template.
///
/// Literals make one: `["type": "object", "properties": ["city": ["type": "string"]]]`.
public enum JSONValue: Sendable, Hashable, Codable {
    case null
    case bool(Bool)
    case int(Int)
    case double(Double)
    case string(String)
    case array([JSONValue])
    case object([String: JSONValue])

    public init(from decoder: any Decoder) throws {
        let value = try decoder.singleValueContainer()
        if value.decodeNil() {
            self = .null
        } else if let bool = try? value.decode(Bool.self) {
            self = .bool(bool)
        } else if let int = try? value.decode(Int.self) {
            self = .int(int)
        } else if let double = try? value.decode(Double.self) {
            self = .double(double)
        } else if let string = try? value.decode(String.self) {
            self = .string(string)
        } else if let array = try? value.decode([JSONValue].self) {
            self = .array(array)
        } else {
            self = .object(try value.decode([String: JSONValue].self))
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var value = encoder.singleValueContainer()
        switch self {
        case .null: try value.encodeNil()
        case .bool(let bool): try value.encode(bool)
        case .int(let int): try value.encode(int)
        case .double(let double): try value.encode(double)
        case .string(let string): try value.encode(string)
        case .array(let array): try value.encode(array)
        case .object(let object): try value.encode(object)
        }
    }

    /// The member of an object; nil for anything else.
    public subscript(key: String) -> JSONValue? {
        if case .object(let object) = self { object[key] } else { nil }
    }

    /// The text, if it is one.
    public var string: String? {
        if case .string(let string) = self { string } else { nil }
    }

    /// The number, if it is one.
    public var double: Double? {
        switch self {
        case .int(let int): Double(int)
        case .double(let double): double
        default: nil
        }
    }
}

extension JSONValue: ExpressibleByStringLiteral, ExpressibleByIntegerLiteral, ExpressibleByFloatLiteral,
    ExpressibleByBooleanLiteral, ExpressibleByArrayLiteral, ExpressibleByDictionaryLiteral, ExpressibleByNilLiteral
{
    public init(stringLiteral value: String) { self = .string(value) }
    public init(integerLiteral value: Int) { self = .int(value) }
    public init(floatLiteral value: Double) { self = .double(value) }
    public init(booleanLiteral value: Bool) { self = .bool(value) }
    public init(arrayLiteral elements: JSONValue...) { self = .array(elements) }
    public init(nilLiteral: ()) { self = .null }
    public init(dictionaryLiteral elements: (String, JSONValue)...) {
        self = .object(Dictionary(elements, uniquingKeysWith: { _, last in last }))
    }
}

/// JSON for the library. Fails for numbers that JSON does not have.
func encoded(_ value: some Encodable, as what: String) throws -> String {
    let encoder = JSONEncoder()
    encoder.outputFormatting = [.sortedKeys]
    do {
        return String(decoding: try encoder.encode(value), as: UTF8.self)
    } catch {
        throw HobError(.invalidArgument, "\(what): not to be written as JSON (a number that is none?)")
    }
}

/// JSON of the library's.
func decoded<T: Decodable>(_ json: String, as type: T.Type = T.self) throws -> T {
    let decoder = JSONDecoder()
    decoder.keyDecodingStrategy = .convertFromSnakeCase
    do {
        return try decoder.decode(type, from: Data(json.utf8))
    } catch {
        throw HobError(.internal, "the library's \(type) is not as expected")
    }
}

/// What a closure or the library gave as unsigned, as Swift counts.
func count(_ value: UInt64) -> Int { Int(clamping: value) }

/// A count for the library.
func unsigned(_ value: Int, _ what: String) throws -> UInt64 {
    guard let unsigned = UInt64(exactly: value) else {
        throw HobError(.invalidArgument, "\(what) is \(value); it must be 0 or more")
    }
    return unsigned
}

func unsigned32(_ value: Int, _ what: String) throws -> UInt32 {
    guard let unsigned = UInt32(exactly: value) else {
        throw HobError(.invalidArgument, "\(what) is \(value); it must be in 0...\(UInt32.max)")
    }
    return unsigned
}

extension Duration {
    /// As the library counts.
    var seconds: Double {
        let (seconds, attoseconds) = components
        return Double(seconds) + Double(attoseconds) * 1e-18
    }
}

/// The arguments of a call, which a model wrote.
func decodedArguments(_ json: String) throws -> JSONValue {
    do {
        return try JSONDecoder().decode(JSONValue.self, from: Data(json.utf8))
    } catch {
        throw HobError(.invalidArgument, "the arguments of the call are not valid JSON")
    }
}
