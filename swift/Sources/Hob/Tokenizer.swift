internal import HobUniFFI

/// A model's tokenizer and chat template. Depends on nothing: the engine may be gone. Any task.
public final class Tokenizer: Sendable {
    private let raw: RawTokenizer
    /// How many tokens the vocabulary has.
    public let vocabularySize: Int
    /// Tokens that one text may have, when the files say.
    public let maxLength: Int?
    /// The token that begins a text.
    public let bosID: UInt32?
    /// The token that fills up a batch.
    public let padID: UInt32?
    /// The token of what the vocabulary does not know.
    public let unknownID: UInt32?
    /// The tokens that end an answer.
    public let eosIDs: [UInt32]
    /// The source of the chat template; nil when the model has none.
    public let chatTemplate: String?
    /// How the model's answers mark reasoning and calls of tools, as far as the template shows.
    public let format: ChatFormat?

    init(_ raw: RawTokenizer) throws {
        let info: Info = try decoded(try attempt { try raw.info() })
        self.raw = raw
        vocabularySize = info.vocabSize
        maxLength = info.maxLength
        bosID = info.bosId
        padID = info.padId
        unknownID = info.unkId
        eosIDs = info.eosIds
        chatTemplate = info.chatTemplate
        format = info.format
    }

    private struct Info: Decodable {
        var vocabSize: Int
        var maxLength: Int?
        var bosId: UInt32?
        var padId: UInt32?
        var unkId: UInt32?
        var eosIds: [UInt32]
        var chatTemplate: String?
        var format: ChatFormat?
    }

    /// A text as tokens. `addsSpecial` adds those that the tokenizer puts around a text; `parsesSpecial` takes special tokens that are
    /// spelled in the text as such, which is wrong for text of users.
    public func encode(_ text: String, addsSpecial: Bool = true, parsesSpecial: Bool = false) async throws -> [UInt32] {
        try await attempt { try await raw.encode(text: text, addSpecial: addsSpecial, parseSpecial: parsesSpecial) }
    }

    /// Tokens as a text. Ids outside the vocabulary are left out; with `skipsSpecial` special tokens are, too.
    public func decode(_ ids: [UInt32], skipsSpecial: Bool = true) async throws -> String {
        try await attempt { try await raw.decode(ids: ids, skipSpecial: skipsSpecial) }
    }

    /// A conversation as the model reads it: how long a transcript is, for example.
    public struct Rendered: Sendable, Hashable {
        /// The text.
        public var text: String
        /// Its tokens. No text of a message becomes a special token.
        public var tokenIDs: [UInt32]
    }

    /// Renders a conversation by the chat template, as ``Engine/generate(_:model:options:)`` does.
    ///
    /// Throws ``HobError/Kind/unsupported`` when the model has no template, ``HobError/Kind/invalidArgument`` when the template refuses.
    public func render(_ messages: [Message], template: TemplateOptions = TemplateOptions()) async throws -> Rendered {
        let messages = try encoded(messages, as: "the messages")
        let template = try encoded(template, as: "the template's options")
        let rendered = try await attempt { try await raw.render(messagesJson: messages, renderJson: template) }
        return Rendered(text: rendered.text, tokenIDs: rendered.tokenIds)
    }
}
