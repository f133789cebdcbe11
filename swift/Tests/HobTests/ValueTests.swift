import CHob
import Foundation
import Hob
import HobTesting
import Testing

extension HobSuite {
    @Suite struct Values {
        private func policy(_ json: String) throws -> IdleResidencyPolicy {
            try JSONDecoder().decode(IdleResidencyPolicy.self, from: Data(json.utf8))
        }

        private func json(_ value: some Encodable) throws -> String {
            let encoder = JSONEncoder()
            encoder.outputFormatting = .sortedKeys
            return String(decoding: try encoder.encode(value), as: UTF8.self)
        }

        @Test func theIdlePolicyReadsAndWritesTheCommonJSON() throws {
            let cases: [(String, IdleResidencyPolicy, String)] = [
                (#"{"mode":"immediately"}"#, .immediately, #"{"mode":"immediately"}"#),
                (#"{"mode":"never","seconds":5}"#, .never, #"{"mode":"never"}"#),
                (#"{"mode":"after_seconds","seconds":300}"#, .afterSeconds(300), #"{"mode":"after_seconds","seconds":300}"#),
                (#"{"mode":"after_seconds","seconds":300.7}"#, .afterSeconds(300), #"{"mode":"after_seconds","seconds":300}"#),
                (#"{"mode":"after_seconds","seconds":1}"#, .afterSeconds(30), #"{"mode":"after_seconds","seconds":30}"#),
                (#"{"mode":"after_seconds","seconds":0}"#, .immediately, #"{"mode":"immediately"}"#),
                (#"{"mode":"after_seconds","seconds":86401}"#, .afterSeconds(86_400), #"{"mode":"after_seconds","seconds":86400}"#),
                (#"{"mode":"after_seconds","seconds":1e30}"#, .afterSeconds(86_400), #"{"mode":"after_seconds","seconds":86400}"#),
            ]
            for (text, expected, canonical) in cases {
                #expect(try policy(text) == expected, "\(text)")
                #expect(try json(expected) == canonical)
            }
            #expect(try json(IdleResidencyPolicy.afterSeconds(5)) == #"{"mode":"after_seconds","seconds":30}"#, "clamped on the way out too")
            #expect(try json(IdleResidencyPolicy.afterSeconds(0)) == #"{"mode":"immediately"}"#)
        }

        @Test(arguments: [
            "null", "7", "[]", "{}", #""never""#, #"{"mode":7}"#, #"{"mode":"soon"}"#, #"{"mode":"after_seconds"}"#, #"{"seconds":60}"#,
            #"{"mode":"after_seconds","seconds":"60"}"#, #"{"mode":"after_seconds","seconds":-1}"#, #"{"mode":"after_seconds","seconds":null}"#,
        ])
        func whatIsNoPolicyIsTheDefault(text: String) throws {
            #expect(try policy(text) == .afterSeconds(900))
            let settings = try JSONDecoder().decode([String: IdleResidencyPolicy].self, from: Data("{\"idle\":\(text)}".utf8))
            #expect(settings == ["idle": .default], "also inside a settings file")
        }

        @Test func messagesAreOpenAIs() throws {
            let call = ToolCall(id: "1", name: "weather", argumentsJSON: #"{"city":"Bern"}"#)
            let messages: [Message] = [
                .system("s"), .user("u"), Message(role: .assistant, content: nil, reasoning: "r", toolCalls: [call]),
                .tool("t", answering: "1"),
            ]
            let text = try json(messages)
            #expect(text.contains(#""function":{"arguments":"{\"city\":\"Bern\"}","name":"weather"}"#) && text.contains(#""reasoning_content":"r""#))
            #expect(try JSONDecoder().decode([Message].self, from: Data(text.utf8)) == messages)
            #expect(try call.arguments()["city"]?.string == "Bern")
            let value: JSONValue = ["a": [1, 2.5, "x", true, nil]]
            #expect(try JSONDecoder().decode(JSONValue.self, from: Data(try json(value).utf8)) == value)
        }

        @Test func cosinesOfVectorsOfTheHost() throws {
            let (a, b) = (Embedding([1, 0]), Embedding([1, 1]))
            let cosine = try #require(a.cosine(b))
            #expect(abs(cosine - 0.70710677) < 1e-6)
            #expect(a.cosine(a) == 1 && a.cosine(Embedding([-2, 0])) == -1 && a.cosine(Embedding([0, 0])) == 0)
            #expect(a.cosine(Embedding([1])) == nil, "of different widths")
            #expect(Array(b) == [1, 1] && b.dot(b) == 2)
            #expect(b.withContiguousStorageIfAvailable { $0.count } == 2)
        }

        /// The numbers of a result are read where they lie, and outlive the engine and the other rows.
        @Test func vectorsAreNotCopied() async throws {
            try await leavingNothing {
                let (first, again, all): (UnsafePointer<Float>?, UnsafePointer<Float>?, [Float])
                let row: Embedding
                do {
                    let vectors = try await Rig().engine.embed(["a", "b"], model: "embedder")
                    row = vectors[1]
                    first = vectors.withUnsafeBufferPointer { $0.baseAddress.map { $0 + vectors.dimensions } }
                    all = vectors.withUnsafeBufferPointer { Array($0) }
                }
                again = row.withUnsafeBufferPointer { $0.baseAddress }
                #expect(first == again && row.vector == Array(all[8...]))
            }
        }

        @Test func errorKindsAreTheCodesOfTheCABI() {
            #expect(HobError.Kind.allCases.count == 16)
            for (kind, code) in [
                (HobError.Kind.invalidArgument, HOB_INVALID_ARGUMENT), (.notFound, HOB_NOT_FOUND), (.callback, HOB_CALLBACK),
                (.closed, HOB_CLOSED), (.internal, HOB_INTERNAL), (.inUse, HOB_IN_USE),
            ] {
                #expect(kind.rawValue == code)
            }
        }

        /// One library carries both surfaces: the C API works in the same process, and MLX is there once.
        @Test func theCAPIIsInTheSameLibrary() async throws {
            try await leavingNothing {
                #expect(hob_abi_check(UInt32(HOB_ABI_VERSION), nil) == HOB_OK)
                let models = #"[{"name": "chat", "kind": "chat", "bytes": 100}]"#
                var engine: OpaquePointer?
                #expect(hob_engine_open_fake(models, Int.max, nil, &engine, nil) != HOB_OK, "a length that is none")
                #expect(hob_engine_open_fake(models, models.utf8.count, nil, &engine, nil) == HOB_OK)
                #expect(hob_engine_availability(engine) == HOB_AVAILABILITY_READY)
                #expect(try liveHandles()["c"] == 1)
                hob_engine_release(engine)
                #if os(Linux)
                    let file = try FileHandle(forReadingFrom: URL(fileURLWithPath: "/proc/self/maps"))
                    let maps = String(decoding: try file.readToEnd() ?? Data(), as: UTF8.self)
                    let mapped = Set(maps.split(separator: "\n").compactMap { $0.split(separator: "/").last })
                    #expect(mapped.filter { $0.hasPrefix("libmlx") }.count == 1 && !mapped.contains { $0.hasPrefix("libhob_ffi") })
                #endif
            }
        }
    }
}
