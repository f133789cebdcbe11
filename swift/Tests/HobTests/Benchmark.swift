import CHob
import Foundation
import Hob
import HobTesting
import Testing

/// What crossing to Swift costs: `HOB_BENCH=1 cargo xtask swift test -- -c release --filter Benchmark`. Prints, and asserts nothing but that
/// both readers saw the same.
extension HobSuite {
    @Suite(.enabled(if: ProcessInfo.processInfo.environment["HOB_BENCH"] != nil, "HOB_BENCH is not set")) struct Benchmark {
        private let tokens = 20_000

        private func median(_ rounds: Int = 7, _ run: () async throws -> Duration) async throws -> Duration {
            var times: [Duration] = []
            for _ in 0..<rounds { times.append(try await run()) }
            return times.sorted()[rounds / 2]
        }

        private func microseconds(_ duration: Duration, per count: Int) -> String {
            let (seconds, attoseconds) = duration.components
            return String(format: "%.2f us", (Double(seconds) * 1e6 + Double(attoseconds) * 1e-12) / Double(count))
        }

        /// A stream read through the Rust API and through the C ABI, beside the same through Swift's: on one scripted device, by turns.
        @Test func aStreamedToken() async throws {
            let reply = String(repeating: "x", count: tokens)
            var model = FakeModel("long", .chat, reply: reply)
            model.context = 1 << 20
            let engine = try await FakeDevice([model]).openEngine()
            try await engine.load("long")
            let json = #"[{"name": "long", "kind": "chat", "bytes": 100, "context": 1048576, "reply": "\#(reply)"}]"#
            var raw: OpaquePointer?
            #expect(hob_engine_open_fake(json, json.utf8.count, nil, &raw, nil) == HOB_OK)
            // By turns, so that what else the machine does falls on all of them.
            var times = [[Duration]](repeating: [], count: 3)
            for _ in 0..<9 {
                times[0].append(
                    try await ContinuousClock().measure {
                        let read = try await readInRust(engine, model: "long", prompt: "Hi")
                        #expect(read == UInt64(tokens))
                    })
                times[1].append(
                    try await ContinuousClock().measure {
                        var read = 0
                        for try await event in try engine.generate("Hi", model: "long") {
                            if case .chunk(let chunk) = event { read += chunk.tokenIDs.count }
                        }
                        #expect(read == tokens)
                    })
                times[2].append(ContinuousClock().measure { #expect(readInC(raw) == tokens) })
            }
            hob_engine_release(raw)
            let medians = times.map { $0.sorted()[$0.count / 2] }
            print(
                "a streamed token: \(microseconds(medians[0], per: tokens)) in Rust, \(microseconds(medians[1], per: tokens)) in Swift,",
                "\(microseconds(medians[2], per: tokens)) through the C ABI; Swift over Rust: \(microseconds(medians[1] - medians[0], per: tokens))")
        }

        private func readInC(_ engine: OpaquePointer?) -> Int {
            "long".withCString { model in
                "Hi".withCString { prompt in
                    var options = hob_generate_options()
                    hob_generate_options_init(&options)
                    options.model = model
                    options.prompt = prompt
                    var stream: OpaquePointer?
                    guard hob_engine_generate(engine, &options, &stream, nil) == HOB_OK else { return -1 }
                    defer { hob_stream_free(stream) }
                    var (read, event) = (0, hob_event())
                    event.struct_size = UInt32(MemoryLayout<hob_event>.size)
                    while hob_stream_next(stream, -1, &event, nil) == HOB_OK { read += Int(event.token_count) }
                    return read
                }
            }
        }

        /// One asynchronous call whose answer is there already: what a token costs when each comes alone.
        @Test func anAsynchronousCall() async throws {
            let engine = try await FakeDevice([FakeModel("chat", .chat)]).openEngine()
            var iterator = try engine.generate("Hi", model: "chat").makeAsyncIterator()
            while try await iterator.next() != nil {}
            // After its end a stream has nothing more, at once: the crossing alone.
            let calls = 10_000
            let time = try await median {
                let start = ContinuousClock.now
                for _ in 0..<calls { _ = try await iterator.next() }
                return ContinuousClock.now - start
            }
            print("an asynchronous call: \(microseconds(time, per: calls))")
        }

        @Test func aVector() async throws {
            var model = FakeModel("wide", .embedder)
            model.dimensions = 4096
            let engine = try await FakeDevice([model]).openEngine()
            let vectors = try await engine.embed((0..<256).map(String.init), model: "wide")
            let copy = try await median { ContinuousClock().measure { #expect(vectors.map { $0.vector.count }.reduce(0, +) == 256 * 4096) } }
            let lent = try await median {
                ContinuousClock().measure { #expect(vectors.withUnsafeBufferPointer { $0.count } == 256 * 4096) }
            }
            print("256 vectors of 4,096: \(microseconds(lent, per: 1)) lent, \(microseconds(copy, per: 1)) copied")
        }
    }
}
