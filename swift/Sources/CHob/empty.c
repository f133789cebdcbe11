// SwiftPM wants a source file; the functions are in the library that CHobUniFFI links.
