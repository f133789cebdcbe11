import Testing
import Hob
@Test func smoke() {}
