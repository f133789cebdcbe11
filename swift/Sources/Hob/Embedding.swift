internal import HobUniFFI

/// A vector: float32 numbers that lie where the library computed them. Copying an embedding copies no numbers.
public struct Embedding: Sendable, RandomAccessCollection {
    private let storage: VectorStorage
    private let range: Range<Int>

    init(_ storage: VectorStorage, _ range: Range<Int>) {
        self.storage = storage
        self.range = range
    }

    /// A vector of the host's own, for example one read from its index.
    public init(_ vector: [Float]) {
        storage = VectorStorage(vector)
        range = 0..<vector.count
    }

    public var startIndex: Int { 0 }
    public var endIndex: Int { range.count }

    public subscript(position: Int) -> Float {
        precondition(position >= 0 && position < range.count, "an embedding's index is out of range")
        return withUnsafeBufferPointer { $0[position] }
    }

    /// Lends the numbers, contiguous and without a copy, for the duration of `body`.
    public func withUnsafeBufferPointer<T>(_ body: (UnsafeBufferPointer<Float>) throws -> T) rethrows -> T {
        try storage.with { try body(UnsafeBufferPointer(rebasing: $0[range])) }
    }

    public func withContiguousStorageIfAvailable<T>(_ body: (UnsafeBufferPointer<Float>) throws -> T) rethrows -> T? {
        try withUnsafeBufferPointer(body)
    }

    /// The numbers, copied once.
    public var vector: [Float] {
        withUnsafeBufferPointer { Array($0) }
    }

    /// The sum of the products; of unit vectors this is the cosine. Nil when the dimensions differ.
    public func dot(_ other: Embedding) -> Float? {
        guard count == other.count else { return nil }
        return withUnsafeBufferPointer { a in
            other.withUnsafeBufferPointer { b in
                var sum: Float = 0
                for index in 0..<a.count { sum += a[index] * b[index] }
                return sum
            }
        }
    }

    /// Cosine of the angle between two vectors, -1 to 1; 0 when either has no length, NaN when either holds what is no number. Nil when the
    /// dimensions differ.
    public func cosine(_ other: Embedding) -> Float? {
        guard count == other.count else { return nil }
        // Squares of large and of tiny numbers do not fit a Float.
        var (product, own, others) = (0.0, 0.0, 0.0)
        withUnsafeBufferPointer { a in
            other.withUnsafeBufferPointer { b in
                for index in 0..<a.count {
                    let (x, y) = (Double(a[index]), Double(b[index]))
                    product += x * y
                    own += x * x
                    others += y * y
                }
            }
        }
        let cosine = product / (own.squareRoot() * others.squareRoot())
        if own == 0 || others == 0 { return 0 }
        return cosine.isFinite ? Float(Swift.min(1, Swift.max(-1, cosine))) : .nan
    }
}

/// Where numbers lie: in the library, kept alive by its handle, or in an array.
final class VectorStorage: Sendable {
    private enum Source: Sendable {
        case library(RawVectors, address: UInt, count: Int)
        case array([Float])
    }

    private let source: Source

    init(_ raw: RawVectors) throws {
        let (address, length) = (try raw.address(), try raw.count())
        source = .library(raw, address: UInt(address), count: count(length))
    }

    init(_ array: [Float]) {
        source = .array(array)
    }

    func with<T>(_ body: (UnsafeBufferPointer<Float>) throws -> T) rethrows -> T {
        switch source {
        case .library(let raw, let address, let count):
            // The numbers never move or change while the handle lives.
            return try withExtendedLifetime(raw) {
                try body(UnsafeBufferPointer(start: UnsafePointer(bitPattern: address), count: count))
            }
        case .array(let array):
            return try array.withUnsafeBufferPointer(body)
        }
    }
}

/// Vectors, one per text in the order given.
public struct Embeddings: Sendable, RandomAccessCollection {
    private let storage: VectorStorage
    /// How many vectors there are.
    public let count: Int
    /// Numbers of each vector.
    public let dimensions: Int
    /// How token states were pooled.
    public let pooling: String
    /// Tokens and times.
    public let usage: Usage
    /// Which model computed them.
    public let provenance: Provenance

    init(_ raw: RawEmbeddings) throws {
        storage = try VectorStorage(raw.vectors)
        dimensions = Hob.count(raw.dimensions)
        count = dimensions > 0 ? storage.with { $0.count } / dimensions : 0
        pooling = raw.pooling
        usage = Usage(raw.usage)
        provenance = try decoded(raw.provenanceJson)
    }

    public var startIndex: Int { 0 }
    public var endIndex: Int { count }

    public subscript(position: Int) -> Embedding {
        precondition(position >= 0 && position < count, "an embedding's index is out of range")
        return Embedding(storage, position * dimensions..<(position + 1) * dimensions)
    }

    /// All numbers, row after row, lent without a copy for the duration of `body`.
    public func withUnsafeBufferPointer<T>(_ body: (UnsafeBufferPointer<Float>) throws -> T) rethrows -> T {
        try storage.with(body)
    }
}

/// How texts are embedded.
public struct EmbeddingOptions: Sendable {
    /// Which of the model's prompts to put before each text, such as `query`; nil takes the model's default prompt.
    public var promptName: String?
    /// Keep so many leading dimensions (Matryoshka).
    public var dimensions: Int?
    /// Scale to unit length; nil does as the model's own modules say.
    public var normalize: Bool?
    /// What happens to a text longer than the model takes.
    public var truncation = Truncation.error
    /// Cancel, timeout, loading.
    public var request: RequestOptions

    public init(promptName: String? = nil, dimensions: Int? = nil, normalize: Bool? = nil, request: RequestOptions = RequestOptions()) {
        self.promptName = promptName
        self.dimensions = dimensions
        self.normalize = normalize
        self.request = request
    }
}
