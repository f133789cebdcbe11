/// A message of a conversation. Its JSON is OpenAI's.
public struct Message: Sendable, Hashable, Codable {
    /// Who speaks.
    public struct Role: RawRepresentable, Sendable, Hashable, Codable, ExpressibleByStringLiteral {
        public let rawValue: String
        public init(rawValue: String) { self.rawValue = rawValue }
        public init(stringLiteral value: String) { rawValue = value }

        public static let system: Role = "system"
        public static let user: Role = "user"
        public static let assistant: Role = "assistant"
        public static let tool: Role = "tool"
    }

    /// Who speaks.
    public var role: Role
    /// What is said; nil for calls without a word. A list of parts of text is read as one text.
    public var content: String?
    /// Who of several speaks, for templates that show it.
    public var name: String?
    /// What an assistant thought before it spoke.
    public var reasoning: String?
    /// Calls of tools that an assistant made.
    public var toolCalls: [ToolCall]
    /// Which call a tool's message answers.
    public var toolCallID: String?
    /// Further fields, handed to the template as they are. One with the name of a field above is left out.
    public var fields: [String: JSONValue] = [:]

    public init(
        role: Role, content: String?, name: String? = nil, reasoning: String? = nil, toolCalls: [ToolCall] = [], toolCallID: String? = nil
    ) {
        self.role = role
        self.content = content
        self.name = name
        self.reasoning = reasoning
        self.toolCalls = toolCalls
        self.toolCallID = toolCallID
    }

    public static func system(_ content: String) -> Message { Message(role: .system, content: content) }
    public static func user(_ content: String) -> Message { Message(role: .user, content: content) }
    public static func assistant(_ content: String) -> Message { Message(role: .assistant, content: content) }
    /// A tool's answer to a call.
    public static func tool(_ content: String, answering id: String) -> Message {
        Message(role: .tool, content: content, toolCallID: id)
    }

    private enum CodingKeys: String, CodingKey, CaseIterable {
        case role, content, name
        case reasoning = "reasoning_content"
        case toolCalls = "tool_calls"
        case toolCallID = "tool_call_id"
    }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: CodingKeys.self)
        role = try fields.decode(Role.self, forKey: .role)
        if let parts = try? fields.decode([Part].self, forKey: .content) {
            content = try Part.text(of: parts, at: fields.codingPath + [CodingKeys.content])
        } else {
            content = try fields.decodeIfPresent(String.self, forKey: .content)
        }
        name = try fields.decodeIfPresent(String.self, forKey: .name)
        reasoning = try fields.decodeIfPresent(String.self, forKey: .reasoning)
        toolCalls = try fields.decodeIfPresent([ToolCall].self, forKey: .toolCalls) ?? []
        toolCallID = try fields.decodeIfPresent(String.self, forKey: .toolCallID)
        let all = try decoder.singleValueContainer().decode([String: JSONValue].self)
        self.fields = all.filter { CodingKeys(rawValue: $0.key) == nil && $0.value != .null }
    }

    public func encode(to encoder: any Encoder) throws {
        var others = encoder.container(keyedBy: AnyKey.self)
        for (key, value) in self.fields where CodingKeys(rawValue: key) == nil {
            try others.encode(value, forKey: AnyKey(stringValue: key))
        }
        var fields = encoder.container(keyedBy: CodingKeys.self)
        try fields.encode(role, forKey: .role)
        try fields.encodeIfPresent(content, forKey: .content)
        try fields.encodeIfPresent(name, forKey: .name)
        try fields.encodeIfPresent(reasoning, forKey: .reasoning)
        if !toolCalls.isEmpty { try fields.encode(toolCalls, forKey: .toolCalls) }
        try fields.encodeIfPresent(toolCallID, forKey: .toolCallID)
    }
}

/// A part of a content in the style of other APIs.
private struct Part: Decodable {
    var type: String
    var text: String?

    static func text(of parts: [Part], at path: [any CodingKey]) throws -> String {
        guard parts.allSatisfy({ $0.type == "text" }) else {
            throw DecodingError.dataCorrupted(.init(codingPath: path, debugDescription: "only parts of type text can be read"))
        }
        return parts.compactMap(\.text).joined()
    }
}

/// A key that is not known beforehand.
private struct AnyKey: CodingKey {
    var stringValue: String
    var intValue: Int? { nil }

    init(stringValue: String) { self.stringValue = stringValue }
    init?(intValue: Int) { nil }
}

/// A call of a tool, as a model made it. Its JSON is OpenAI's.
public struct ToolCall: Sendable, Hashable, Codable, Identifiable {
    /// Which call this is; the tool's answer names it.
    public var id: String
    /// The tool's name.
    public var name: String
    /// The arguments: the text of a JSON object, as the model wrote it.
    public var argumentsJSON: String

    public init(id: String, name: String, argumentsJSON: String) {
        self.id = id
        self.name = name
        self.argumentsJSON = argumentsJSON
    }

    /// The arguments, read.
    public func arguments() throws -> JSONValue {
        try decodedArguments(argumentsJSON)
    }

    private enum CodingKeys: String, CodingKey {
        case id, type, function
    }

    private enum FunctionKeys: String, CodingKey {
        case name, arguments
    }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: CodingKeys.self)
        let function = try fields.nestedContainer(keyedBy: FunctionKeys.self, forKey: .function)
        id = try fields.decodeIfPresent(String.self, forKey: .id) ?? ""
        name = try function.decode(String.self, forKey: .name)
        // Some APIs give the object itself.
        argumentsJSON =
            if let text = try? function.decode(String.self, forKey: .arguments) {
                text
            } else {
                try encoded(try function.decodeIfPresent([String: JSONValue].self, forKey: .arguments) ?? [:], as: "the arguments of a call")
            }
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: CodingKeys.self)
        try fields.encode(id, forKey: .id)
        try fields.encode("function", forKey: .type)
        var function = fields.nestedContainer(keyedBy: FunctionKeys.self, forKey: .function)
        try function.encode(name, forKey: .name)
        try function.encode(argumentsJSON, forKey: .arguments)
    }
}

/// A tool that a model may call. Hob hands it to the model's template and reads the calls; making them is the host's.
public struct Tool: Sendable, Hashable, Encodable {
    /// What calls name.
    public var name: String
    /// What it does, for the model.
    public var description: String
    /// What it takes: a JSON schema of an object.
    public var parameters: JSONValue

    public init(name: String, description: String, parameters: JSONValue = ["type": "object", "properties": [:]]) {
        self.name = name
        self.description = description
        self.parameters = parameters
    }

    private enum CodingKeys: String, CodingKey {
        case type, function
    }

    private enum FunctionKeys: String, CodingKey {
        case name, description, parameters
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: CodingKeys.self)
        try fields.encode("function", forKey: .type)
        var function = fields.nestedContainer(keyedBy: FunctionKeys.self, forKey: .function)
        try function.encode(name, forKey: .name)
        try function.encode(description, forKey: .description)
        try function.encode(parameters, forKey: .parameters)
    }
}
