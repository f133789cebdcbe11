// A small app: chat, search, the pool, and how long models stay. Choose models in Settings.

import Hob
import SwiftUI

@main
struct HobApp: App {
    @State private var model = AppModel()

    init() {
        // Started by `swift run` there is no bundle that says so, and no keyboard for the window without it.
        NSApplication.shared.setActivationPolicy(.regular)
    }

    var body: some Scene {
        Window("Hob", id: "main") {
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
