// swift-tools-version: 6.0
// Run with `HOB_LIBRARY_DIR=$(cargo xtask swift build) swift run` in this folder, on macOS.
import PackageDescription

let package = Package(
    name: "HobApp",
    platforms: [.macOS(.v14)],
    dependencies: [.package(name: "Hob", path: "../..")],
    targets: [
        .executableTarget(name: "HobApp", dependencies: [.product(name: "Hob", package: "Hob")], path: "Sources")
    ],
    swiftLanguageModes: [.v6]
)
