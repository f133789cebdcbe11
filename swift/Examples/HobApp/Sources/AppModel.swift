// What the app does, without its views: so it is compiled and tested wherever Swift is (Tests/HobTests/AppTests.swift).

import Foundation
import Hob
import Observation

/// What the views share. The engine lives as long as the app.
@MainActor @Observable
final class AppModel {
    private(set) var engine: Engine?
    private(set) var session: Session?
    private(set) var messages: [Message] = []
    private(set) var answer = ""
    private(set) var results: [(text: String, score: Float)] = []
    private(set) var status: PoolStatus?
    private(set) var failure: String?
    private var turn: Task<Void, Never>?
    private let settings: UserDefaults
    private let start: @Sendable (EngineOptions) async throws -> Engine

    /// The arguments are for tests, which have a scripted device.
    init(settings: UserDefaults = .standard, start: @escaping @Sendable (EngineOptions) async throws -> Engine = { try await Engine.open($0) }) {
        self.settings = settings
        self.start = start
        chatModel = settings.string(forKey: "chatModel") ?? ""
        embedder = settings.string(forKey: "embedder") ?? ""
        keepLoaded = settings.data(forKey: "keepLoaded").map(Self.policy) ?? .default
    }

    var chatModel: String {
        didSet {
            settings.set(chatModel, forKey: "chatModel")
            newSession()
        }
    }
    var embedder: String {
        didSet { settings.set(embedder, forKey: "embedder") }
    }
    /// "Keep model loaded after use". Reading a broken or future setting gives the default.
    var keepLoaded: IdleResidencyPolicy {
        didSet {
            settings.set(try? JSONEncoder().encode(keepLoaded), forKey: "keepLoaded")
            attempt { try engine?.pool.setDefaultIdle(keepLoaded) }
        }
    }

    private nonisolated static func policy(_ json: Data) -> IdleResidencyPolicy {
        (try? JSONDecoder().decode(IdleResidencyPolicy.self, from: json)) ?? .default
    }

    var isAnswering: Bool { turn != nil }

    func open() async {
        do {
            if engine == nil {
                engine = try await start(EngineOptions(idle: keepLoaded))
                newSession()
            }
            guard let engine else { return }
            // The pool tells when something changes: nothing is polled.
            let events = try engine.pool.events()
            status = try engine.pool.status()
            for try await _ in events { status = try engine.pool.status() }
        } catch {
            failure = "\(error)"
        }
    }

    private func newSession() {
        guard let engine, !chatModel.isEmpty else { return }
        stop()
        messages = []
        session = Session(engine: engine, model: chatModel)
    }

    func send(_ prompt: String) {
        guard let session, turn == nil else { return }
        failure = nil
        messages.append(.user(prompt))
        turn = Task {
            do {
                for try await snapshot in session.streamResponse(to: prompt) { answer = snapshot.content }
            } catch is CancellationError {
                // Stopped by the person: the transcript is as it was before.
            } catch {
                failure = "\(error)"
            }
            (answer, turn) = ("", nil)
            // Another model may have been chosen meanwhile.
            if session === self.session { messages = session.transcript }
        }
    }

    func stop() {
        turn?.cancel()
    }

    func search(_ query: String, in text: String) async {
        guard let engine else { return }
        let lines = text.split(separator: "\n").map(String.init)
        do {
            let ranking = try await engine.rerank(query, documents: lines, model: embedder)
            results = ranking.results.map { (lines[$0.index], $0.score) }
        } catch {
            failure = "\(error)"
        }
    }

    func evict(_ key: ResidentKey) async {
        do { try await engine?.pool.evict(key) } catch { failure = "\(error)" }
    }

    private func attempt(_ change: () throws -> Void) {
        do { try change() } catch { failure = "\(error)" }
    }
}
