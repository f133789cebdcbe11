// A small app: chat, search, the pool, and how long models stay. Choose models in Settings.

import Hob
import SwiftUI

@main
struct HobApp: App {
    @State private var model = AppModel()

    var body: some Scene {
        WindowGroup {
            TabView {
                ChatView().tabItem { Label("Chat", systemImage: "bubble.left") }
                SearchView().tabItem { Label("Search", systemImage: "magnifyingglass") }
                PoolView().tabItem { Label("Memory", systemImage: "memorychip") }
            }
            .environment(model)
            .frame(minWidth: 480, minHeight: 360)
            .task { await model.open() }
        }
        Settings { SettingsView().environment(model) }
    }
}

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

    var chatModel = UserDefaults.standard.string(forKey: "chatModel") ?? "" {
        didSet {
            UserDefaults.standard.set(chatModel, forKey: "chatModel")
            newSession()
        }
    }
    var embedder = UserDefaults.standard.string(forKey: "embedder") ?? "" {
        didSet { UserDefaults.standard.set(embedder, forKey: "embedder") }
    }
    /// "Keep model loaded after use". Reading a broken or future setting gives the default.
    var keepLoaded = UserDefaults.standard.data(forKey: "keepLoaded").map(AppModel.policy) ?? .default {
        didSet {
            UserDefaults.standard.set(try? JSONEncoder().encode(keepLoaded), forKey: "keepLoaded")
            attempt { try engine?.pool.setDefaultIdle(keepLoaded) }
        }
    }

    private static func policy(_ json: Data) -> IdleResidencyPolicy {
        (try? JSONDecoder().decode(IdleResidencyPolicy.self, from: json)) ?? .default
    }

    var isAnswering: Bool { turn != nil }

    func open() async {
        guard engine == nil else { return }
        do {
            let engine = try await Engine.open(EngineOptions(idle: keepLoaded))
            self.engine = engine
            newSession()
            // The pool tells when something changes: nothing is polled.
            status = try engine.pool.status()
            for try await _ in try engine.pool.events() { status = try engine.pool.status() }
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
            (messages, answer, turn) = (session.transcript, "", nil)
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

struct ChatView: View {
    @Environment(AppModel.self) private var model
    @State private var prompt = ""

    var body: some View {
        VStack(alignment: .leading) {
            ScrollView {
                LazyVStack(alignment: .leading, spacing: 8) {
                    ForEach(Array(model.messages.enumerated()), id: \.offset) { _, message in
                        Text(message.content ?? "").foregroundStyle(message.role == .user ? .secondary : .primary)
                    }
                    if model.isAnswering { Text(model.answer.isEmpty ? "…" : model.answer) }
                }
                .frame(maxWidth: .infinity, alignment: .leading)
            }
            if let failure = model.failure { Text(failure).foregroundStyle(.red) }
            HStack {
                TextField("Message", text: $prompt).onSubmit(send).disabled(model.session == nil)
                if model.isAnswering {
                    Button("Stop", action: model.stop)
                } else {
                    Button("Send", action: send).disabled(prompt.isEmpty || model.session == nil)
                }
            }
        }
        .padding()
    }

    private func send() {
        model.send(prompt)
        prompt = ""
    }
}

struct SearchView: View {
    @Environment(AppModel.self) private var model
    @State private var query = ""
    @State private var text = "A cat sleeps on the sill.\nMarkets fell on Monday."

    var body: some View {
        VStack(alignment: .leading) {
            TextEditor(text: $text).frame(height: 120)
            TextField("What are you looking for?", text: $query).onSubmit {
                Task { await model.search(query, in: text) }
            }
            List(Array(model.results.enumerated()), id: \.offset) { _, result in
                LabeledContent(result.text, value: result.score, format: .number.precision(.fractionLength(2)))
            }
        }
        .padding()
    }
}

struct PoolView: View {
    @Environment(AppModel.self) private var model

    var body: some View {
        VStack(alignment: .leading) {
            if let status = model.status {
                ProgressView(value: min(Double(status.usedBytes), Double(status.budgetBytes)), total: Double(status.budgetBytes)) {
                    Text("\(status.usedBytes.formatted(.byteCount(style: .memory))) of \(status.budgetBytes.formatted(.byteCount(style: .memory)))")
                }
                List(status.entries) { entry in
                    HStack {
                        Text(entry.key.description).lineLimit(1).truncationMode(.middle)
                        Spacer()
                        Text(entry.uses > 0 ? "in use" : entry.state.rawValue)
                        Text(entry.bytes.formatted(.byteCount(style: .memory)))
                        Button("Unload") { Task { await model.evict(entry.key) } }.disabled(entry.uses > 0)
                    }
                }
            }
        }
        .padding()
    }
}

struct SettingsView: View {
    @Environment(AppModel.self) private var model

    var body: some View {
        @Bindable var model = model
        Form {
            TextField("Chat model", text: $model.chatModel, prompt: Text("folder, .gguf file or hub id"))
            TextField("Embedder or reranker", text: $model.embedder)
            Picker("Keep model loaded after use", selection: $model.keepLoaded) {
                ForEach(IdleResidencyPolicy.presets, id: \.self) { Text(label($0)).tag($0) }
            }
        }
        .padding()
        .frame(width: 420)
    }

    private func label(_ policy: IdleResidencyPolicy) -> String {
        switch policy {
        case .immediately: "Unload immediately"
        case .afterSeconds(let seconds): "\(seconds / 60) minutes"
        case .never: "Until the app quits"
        }
    }
}
