/// What a model's files say, without loading it.
public struct ModelInfo: Sendable, Hashable, Decodable {
    /// The canonical path.
    public var id: String
    /// What it is for.
    public var kind: ModelKind
    /// `model_type` of its configuration.
    public var family: String
    /// The stored quantisation, if any.
    public var quantization: String?
    /// Whether quantised weights will be expanded when loaded here.
    public var dequantized: Bool
    /// The number type it will compute in here; nil for a fake.
    public var float: String?
    /// Tokens it can attend to.
    public var context: Int
    /// Tokens that one input of an embedder or reranker may have.
    public var maxInput: Int
    /// The verbs it serves.
    public var capabilities: [Capability]
    /// How an embedder pools.
    public var pooling: String?
    /// Names of an embedder's prompts.
    public var prompts: [String]
    /// Bytes by part.
    public var estimate: Estimate
}

/// A verb that a model serves.
public enum Capability: String, Sendable, Hashable, Codable, CaseIterable {
    case generate, score, decide, embed, rerank
}

/// What a model will take, in bytes, before it is loaded.
public struct Estimate: Sendable, Hashable, Decodable {
    /// The weights as they will lie in memory.
    public var weights: Int
    /// Keys and values of one conversation of min(8192, context) tokens.
    public var kvCache: Int
    /// Temporaries of the largest step.
    public var working: Int

    /// The sum: what the pool charges.
    public var total: Int {
        // A file may claim anything.
        [kvCache, working].reduce(weights) { sum, part in
            let (sum, overflow) = sum.addingReportingOverflow(part)
            return overflow ? .max : sum
        }
    }
}

/// Where a result comes from.
public struct Provenance: Sendable, Hashable, Decodable {
    /// The model's canonical path.
    public var model: String
    /// `model_type` of its configuration.
    public var family: String
    /// The stored quantisation, if any.
    public var quantization: String?
    /// Digest of the manifest that the files were checked against, if they were.
    public var manifest: String?
    /// Hob's version, the device's kind and its runtime's version.
    public var runtime: String
}

/// The device that computes.
public struct DeviceInfo: Sendable, Hashable, Decodable {
    /// `cpu`, `gpu` (Metal or CUDA), or `fake`.
    public var kind: String
    /// The device's own name.
    public var name: String
    /// MLX's version.
    public var version: String
    /// Bytes that the device recommends to stay within, when it says.
    public var recommendedBytes: Int?
}
