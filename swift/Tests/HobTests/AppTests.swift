import Foundation
import Hob
import HobTesting
import Testing

extension HobSuite {
    /// The SwiftUI example, without its views.
    @Suite @MainActor struct App {
        private func model(_ device: FakeDevice, settings: UserDefaults) -> AppModel {
            AppModel(settings: settings, start: { try await device.openEngine($0) })
        }

        /// Settings that nobody else has.
        private func settings() throws -> UserDefaults {
            let name = "dev.hob.tests.\(UUID().uuidString)"
            let settings = try #require(UserDefaults(suiteName: name))
            settings.removePersistentDomain(forName: name)
            return settings
        }

        @Test func itChatsSearchesAndShowsThePool() async throws {
            try await leavingNothing {
                let device = try FakeDevice([
                    FakeModel("chat", .chat), FakeModel("long", .chat, reply: Rig.long), FakeModel("reranker", .reranker),
                ])
                let settings = try settings()
                let app = model(device, settings: settings)
                app.chatModel = "chat"
                app.embedder = "reranker"
                let window = Task { await app.open() }
                #expect(await happens { app.session != nil })
                app.send("Hi")
                #expect(await happens { !app.isAnswering })
                #expect(app.messages == [.user("Hi"), .assistant("Hello!")] && app.answer.isEmpty && app.failure == nil)
                await app.search("two", in: "one\ntwo\n\nthree")
                #expect(app.results.count == 3)
                #expect(await happens { app.status?.entries.count == 2 }, "the pool's events bring the status up to date")
                await app.evict(chatKey)
                #expect(await happens { app.status?.entries.count == 1 })

                // Another model in the middle of an answer: nothing of the old conversation comes back.
                app.chatModel = "long"
                try device.hold(.step)
                app.send("Tell me a story.")
                try await device.waitUntilHeld(.step)
                app.chatModel = "chat"
                try device.release(.step)
                #expect(await happens { !app.isAnswering })
                #expect(app.messages.isEmpty && app.failure == nil)

                app.keepLoaded = .immediately
                let again = model(device, settings: settings)
                #expect(again.keepLoaded == .immediately && again.chatModel == "chat" && again.embedder == "reranker")
                window.cancel()
                await window.value
            }
        }

        @Test func itShowsWhatWentWrongAndGoesOn() async throws {
            try await leavingNothing {
                let device = try FakeDevice([FakeModel("chat", .chat)])
                let app = model(device, settings: try settings())
                app.chatModel = "nowhere"
                let window = Task { await app.open() }
                #expect(await happens { app.session != nil })
                app.send("Hi")
                #expect(await happens { !app.isAnswering })
                #expect(app.failure?.contains("NotFound") == true && app.messages.isEmpty)
                app.chatModel = "chat"
                app.send("Hi")
                #expect(await happens { app.messages.count == 2 && !app.isAnswering })
                window.cancel()
                await window.value
            }
        }
    }
}
