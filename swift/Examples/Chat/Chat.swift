// A chat on the command line. From the repository: cargo xtask swift run -- hob-chat MODEL [INSTRUCTIONS]

import Foundation
import Hob

@main
struct ChatProgram {
    static func main() async {
        let arguments = CommandLine.arguments.dropFirst()
        guard let model = arguments.first else {
            write("usage: hob-chat MODEL [INSTRUCTIONS]\nMODEL is a folder, a .gguf file, or a hub id in the local cache\n")
            exit(2)
        }
        do {
            let engine = try await Engine.open()
            let session = Session(engine: engine, model: model, instructions: arguments.dropFirst().first)
            try await chat(session, lines: typed(), write: write)
            try await engine.close()
        } catch {
            write("\(error)\n")
            exit(1)
        }
    }

    @Sendable private static func write(_ text: String) {
        FileHandle.standardOutput.write(Data(text.utf8))
    }

    /// What a person types; reading blocks, so it has a thread of its own.
    private static func typed() -> AsyncStream<String> {
        AsyncStream { lines in
            Thread.detachNewThread {
                while let line = readLine() { lines.yield(line) }
                lines.finish()
            }
        }
    }
}

/// Talks until the lines end. `/pool` shows who is in memory.
func chat(_ session: Session, lines: AsyncStream<String>, write: @Sendable (String) -> Void) async throws {
    session.prewarm()
    write("> ")
    for await line in lines {
        switch line.trimmingCharacters(in: .whitespaces) {
        case "": break
        case "/pool":
            let status = try session.engine.pool.status()
            for entry in status.entries { write("\(entry.key)  \(entry.bytes / 1_000_000) MB  \(entry.state)\n") }
            write("\(status.usedBytes / 1_000_000) of \(status.budgetBytes / 1_000_000) MB\n")
        case let prompt:
            do {
                for try await snapshot in session.streamResponse(to: prompt, options: GenerationOptions(maxTokens: 512)) {
                    write(snapshot.delta)
                    if let usage = snapshot.summary?.usage { write("\n(\(usage.completionTokens) tokens)\n") }
                }
            } catch let error as HobError where error.kind != .closed {
                write("\(error)\n")
            }
        }
        write("> ")
    }
    write("\n")
}
