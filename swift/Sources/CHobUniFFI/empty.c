// The module is its header; SwiftPM wants a source to compile.
