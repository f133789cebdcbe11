import Foundation
import Hob
@testable import HobChat
import HobTesting
import Testing

extension HobSuite {
    @Suite struct Examples {
        @Test func theChatAnswersShowsThePoolAndOutlivesAnError() async throws {
            try await leavingNothing {
                let rig = try await Rig()
                let session = Session(engine: rig.engine, model: "chat", instructions: "Be kind.")
                let written = HostPool.Log()
                try rig.device.failNext(.prefill)
                let lines = AsyncStream<String> { lines in
                    for line in ["Hi", "Hi again", "", "/pool"] { lines.yield(line) }
                    lines.finish()
                }
                try await chat(session, lines: lines, write: { written.add($0) })
                let output = written.lines.joined()
                #expect(output.hasPrefix("> Backend: "), "\(output)")
                #expect(output.contains("> Hello!\n(6 tokens)\n> > chat:chat  0 MB  ready\n"), "\(output)")
                #expect(session.transcript.count == 3, "the failed turn left no trace")
                #expect(await happens { rig.engine.requests == 0 })
            }
        }

        /// Every example of the READMEs, the guide and the sources is in Snippets.swift, word for word, and so is compiled.
        @Test(arguments: ["README.md", "swift/README.md", "swift/Sources/Hob/Hob.docc", "swift/Sources/Hob"])
        func documentedExamplesAreCompiled(place: String) throws {
            let code = lines(try String(contentsOf: repository("swift/Tests/HobTests/Snippets.swift"), encoding: .utf8))
            let place = repository(place)
            let names = try place.hasDirectoryPath || place.pathExtension == "docc" || place.pathExtension.isEmpty
                ? FileManager.default.contentsOfDirectory(atPath: place.path).map(place.appendingPathComponent(_:)) : [place]
            var found = 0
            for file in names where ["md", "swift"].contains(file.pathExtension) {
                for block in blocks(of: try String(contentsOf: file, encoding: .utf8)) {
                    found += 1
                    #expect(code.contains(block), "in \(file.lastPathComponent):\n\(block.joined(separator: "\n"))")
                }
            }
            #expect(found > 0, "\(place.path) has examples")
        }

        private func lines(_ text: String) -> [String] {
            text.split(separator: "\n").map { $0.trimmingCharacters(in: .whitespaces) }.filter { !$0.isEmpty }
        }

        /// The Swift blocks of a text, or of a source's comments.
        private func blocks(of text: String) -> [[String]] {
            var (all, block) = ([[String]](), [String]?.none)
            for line in lines(text.replacingOccurrences(of: "///", with: "")) {
                if line == "```swift" {
                    block = []
                } else if line == "```" {
                    if let block { all.append(block) }
                    block = nil
                } else {
                    block?.append(line)
                }
            }
            return all
        }
    }
}
