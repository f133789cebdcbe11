#![allow(clippy::unwrap_used)]

use super::testing::{GgufBuilder, text};
use super::*;
use crate::error::ErrorKind;

fn sample() -> GgufBuilder {
    GgufBuilder::new()
        .string("general.architecture", "llama")
        .u32("general.alignment", 32)
        .u32("llama.block_count", 2)
        .raw("llama.vocab_size", 0, vec![9])
        .raw("a.i8", 1, vec![0xff])
        .set("a.f32", GgufValue::F32(1.5))
        .set("a.f64", GgufValue::F64(2.5))
        .set("a.bool", GgufValue::Bool(true))
        .set("a.u64s", GgufValue::Array(GgufArray::Unsigned(vec![1, 2])))
        .set("a.i64s", GgufValue::Array(GgufArray::Signed(vec![3, -4])))
        .set("a.f32s", GgufValue::Array(GgufArray::F32(vec![0.5])))
        .set("a.f64s", GgufValue::Array(GgufArray::F64(vec![0.25])))
        .set("a.bools", GgufValue::Array(GgufArray::Bool(vec![true, false])))
        .strings("tokenizer.ggml.tokens", &["a", "é", ""])
        .tensor("w.q", &[32, 2], 2, 0)
        .tensor("w.f", &[3], 0, 64)
        .tensor("w.b", &[4, 2, 1, 1], 30, 96)
        .data(112)
}

fn error(file: &GgufBuilder) -> Error {
    GgufHeader::from_bytes(&file.build()).expect_err("the file is bad")
}

fn bad(file: &GgufBuilder, parts: &[&str]) {
    let error = error(file);
    assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{error} lacks {part}");
    }
}

#[test]
fn a_good_file_is_read_whole() {
    let header = GgufHeader::from_bytes(&sample().build()).unwrap();
    assert_eq!((header.version(), header.alignment(), header.arch().unwrap()), (3, 32, "llama"));
    assert_eq!(header.u32("llama.block_count").unwrap(), 2);
    assert_eq!(header.u64("llama.vocab_size").unwrap(), 9);
    assert!((header.f32("a.f32").unwrap() - 1.5).abs() < 1e-6);
    assert!((header.f32("a.f64").unwrap() - 2.5).abs() < 1e-6);
    assert!(header.bool("a.bool").unwrap());
    assert_eq!(header.opt_u64s("a.u64s").unwrap().unwrap(), [1, 2]);
    assert_eq!(header.opt_f32s("a.f32s").unwrap().unwrap(), [0.5]);
    assert_eq!(header.strings("tokenizer.ggml.tokens").unwrap(), ["a", "é", ""]);
    assert_eq!(header.array("a.bools").unwrap().len(), 2);
    let tensor = header.tensor("w.q").unwrap();
    assert_eq!((tensor.tensor_type, tensor.elements(), tensor.bytes, tensor.shape()), (TensorType::Q4_0, 64, 36, vec![2, 32]));
    assert_eq!(tensor.offset, header.data_offset());
    assert_eq!(header.tensor("w.b").unwrap().offset + 16, header.file_bytes());
    assert_eq!(header.tensor_bytes(), 36 + 12 + 16);
    header.check_loadable().unwrap();
    GgufHeader::from_bytes(&sample().version(2).build()).unwrap();
}

#[test]
fn getters_name_the_key_and_what_is_wrong() {
    let header = GgufHeader::from_bytes(&sample().build()).unwrap();
    for (error, parts) in [
        (header.u64("general.architecture").unwrap_err(), ["general.architecture", "a string where an integer"]),
        (header.u64("a.i8").unwrap_err(), ["a.i8", "-1"]),
        (header.string("none").unwrap_err(), ["none", "missing"]),
        (header.f32("a.bool").unwrap_err(), ["a.bool", "a boolean where a number"]),
        (header.bool("a.f32").unwrap_err(), ["a.bool", "a.f32"]),
        (header.strings("a.u64s").unwrap_err(), ["a.u64s", "an array of strings"]),
        (header.opt_u64s("a.i64s").unwrap_err(), ["a.i64s", "negative"]),
        (header.tensor("gone").unwrap_err(), ["gone", "missing"]),
    ] {
        assert_eq!(error.kind(), ErrorKind::BadModel);
        assert!(parts.iter().any(|part| error.message().contains(part)), "{error}");
    }
    assert_eq!(header.opt_u64("none").unwrap(), None);
    let nan = GgufHeader::from_bytes(&GgufBuilder::new().set("x", GgufValue::F32(f32::NAN)).build()).unwrap();
    assert!(nan.f32("x").unwrap_err().message().contains("finite"));
}

#[test]
fn missing_files_and_folders_are_typed() {
    assert_eq!(GgufHeader::open("/no/such/file.gguf").unwrap_err().kind(), ErrorKind::NotFound);
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(GgufHeader::open(dir.path()).unwrap_err().kind(), ErrorKind::BadModel | ErrorKind::Io));
    let path = dir.path().join("with space é.gguf");
    std::fs::write(&path, sample().build()).unwrap();
    assert_eq!(GgufHeader::open(&path).unwrap().path(), path);
    std::fs::write(&path, b"").unwrap();
    let error = GgufHeader::open(&path).unwrap_err();
    assert!(error.kind() == ErrorKind::BadModel && error.message().contains("with space"), "{error}");
}

#[test]
fn other_formats_and_versions_are_refused() {
    assert!(GgufHeader::from_bytes(b"not a gguf file at all").unwrap_err().message().contains("magic"));
    for version in [0, 1, 4, 3_u32.swap_bytes(), 2_u32.swap_bytes()] {
        assert_eq!(error(&sample().version(version)).kind(), ErrorKind::Unsupported, "{version}");
    }
}

#[test]
fn hostile_numbers_are_refused_before_anything_is_allocated() {
    let huge = 1_u64 << 62;
    let mut header = sample().build();
    header[8..16].copy_from_slice(&huge.to_le_bytes());
    assert!(GgufHeader::from_bytes(&header).unwrap_err().message().contains("tensor count"));
    let mut header = sample().build();
    header[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(GgufHeader::from_bytes(&header).unwrap_err().message().contains("metadata count"));

    for length in [huge, u64::MAX, 1 << 23, 1 << 40] {
        bad(&GgufBuilder::new().raw("k", 8, length.to_le_bytes().to_vec()), &["k"]);
        for code in [0_u32, 4, 8, 10] {
            let mut array = code.to_le_bytes().to_vec();
            array.extend(length.to_le_bytes());
            bad(&GgufBuilder::new().raw("k", 9, array), &["k"]);
        }
    }
    let mut nested = 9_u32.to_le_bytes().to_vec();
    nested.extend(1_u64.to_le_bytes());
    assert_eq!(error(&GgufBuilder::new().raw("k", 9, nested)).kind(), ErrorKind::Unsupported);
    bad(&GgufBuilder::new().raw("k", 13, vec![]), &["k", "type 13"]);
    bad(&GgufBuilder::new().raw("k", 7, vec![2]), &["k", "boolean"]);
    bad(&GgufBuilder::new().raw("k", 8, [&3_u64.to_le_bytes()[..], &[0xff, 0xfe, 0xfd]].concat()), &["k", "UTF-8"]);
    bad(&GgufBuilder::new().u32("k", 1).u32("k", 1), &["k", "twice"]);
    bad(&GgufBuilder::new().u32("", 1), &["metadata key 0"]);
}

#[test]
fn alignment_must_be_a_small_power_of_two() {
    for alignment in [0, 3, 24, u32::MAX, 1 << 30] {
        bad(&GgufBuilder::new().u32("general.alignment", alignment), &["general.alignment"]);
    }
    bad(&GgufBuilder::new().string("general.alignment", "32"), &["general.alignment"]);
    bad(&GgufBuilder::new().set("general.alignment", GgufValue::Unsigned(32)), &["general.alignment", "uint32"]);
    GgufHeader::from_bytes(&GgufBuilder::new().u32("general.alignment", 64).build()).unwrap();
}

#[test]
fn tensors_must_lie_in_the_file() {
    let tensor = |dims: &[u64], code, offset| GgufBuilder::new().tensor("t", dims, code, offset).data(64);
    GgufHeader::from_bytes(&tensor(&[16], 0, 0).build()).unwrap();
    bad(&tensor(&[17], 0, 0), &["t", "truncated"]);
    bad(&tensor(&[8], 0, 64), &["t", "truncated"]);
    bad(&tensor(&[8], 0, u64::MAX - 31), &["t"]);
    bad(&tensor(&[8], 0, 8), &["t", "alignment"]);
    bad(&tensor(&[], 0, 0), &["t", "dimensions"]);
    bad(&tensor(&[1, 1, 1, 1, 1], 0, 0), &["t", "dimensions"]);
    bad(&tensor(&[0], 0, 0), &["t", "dimension 0"]);
    bad(&tensor(&[1 << 30, 1 << 30, 1 << 30], 0, 0), &["t", "overflows"]);
    bad(&tensor(&[1 << 40], 0, 0), &["t"]);
    bad(&tensor(&[33], 2, 0), &["t", "Q4_0", "32"]);
    bad(&tensor(&[4], 0, 0).tensor("t", &[4], 0, 32), &["t", "twice"]);
    bad(&tensor(&[16], 0, 0).tensor("u", &[4], 0, 32), &["u", "overlap"]);
    let unknown = error(&tensor(&[16], 77, 0));
    assert!(unknown.kind() == ErrorKind::Unsupported && unknown.message().contains("77"), "{unknown}");
}

#[test]
fn a_type_hob_cannot_run_is_named() {
    let file = GgufBuilder::new().tensor("blk.0.w", &[256], 14, 0).data(210);
    let header = GgufHeader::from_bytes(&file.build()).unwrap();
    let error = header.check_loadable().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("blk.0.w") && error.message().contains("Q6_K"), "{error}");
}

/// Every cut and every change of a byte gives a header or a typed error.
#[test]
fn mutations_never_panic() {
    let good = sample().build();
    for length in 0..good.len() {
        let error = GgufHeader::from_bytes(&good[..length]).expect_err("a cut file is bad");
        assert!(matches!(error.kind(), ErrorKind::BadModel | ErrorKind::Unsupported), "{length}: {error}");
    }
    let mut outcomes = [0_usize; 2];
    for at in 0..good.len() {
        for change in [0x01, 0x02, 0x04, 0x80, 0xff, 0x7f, 0x20] {
            let mut file = good.clone();
            file[at] ^= change;
            match GgufHeader::from_bytes(&file) {
                Ok(header) => {
                    outcomes[0] += 1;
                    for tensor in header.tensors().values() {
                        assert!(tensor.offset + tensor.bytes <= file.len() as u64);
                    }
                    let _ = header.check_loadable();
                }
                Err(error) => {
                    outcomes[1] += 1;
                    assert!(matches!(error.kind(), ErrorKind::BadModel | ErrorKind::Unsupported), "{at}: {error}");
                }
            }
        }
        // Eight bytes of ones, as a length or a count.
        let mut file = good.clone();
        let end = (at + 8).min(file.len());
        file[at..end].fill(0xff);
        let _ = GgufHeader::from_bytes(&file);
    }
    assert!(outcomes[0] > 100 && outcomes[1] > 100, "{outcomes:?}");
}

#[test]
fn inserted_and_swapped_pieces_never_panic() {
    let good = sample().build();
    let mut state = 12345_u64;
    let mut random = move |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % limit
    };
    for _ in 0..5000 {
        let mut file = good.clone();
        for _ in 0..=random(4) {
            let (a, b, length) = (random(file.len() - 16), random(file.len() - 16), random(16));
            match random(3) {
                0 => file.copy_within(a..a + length, b),
                1 => drop(file.drain(a..a + length)),
                _ => {
                    let piece = file[a..a + length].to_vec();
                    file.splice(b..b, piece);
                }
            }
        }
        let _ = GgufHeader::from_bytes(&file);
    }
    assert_eq!(text("a").len(), 9);
}
