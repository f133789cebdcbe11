//! The types of tensors a GGUF file may hold.

use std::fmt;

/// How the numbers of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(non_camel_case_types, missing_docs)]
pub enum TensorType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
}

/// Type, code in the file, name, numbers per block, bytes per block.
const TENSOR_TYPES: [(TensorType, u32, &str, u64, u64); 32] = [
    (TensorType::F32, 0, "F32", 1, 4),
    (TensorType::F16, 1, "F16", 1, 2),
    (TensorType::Q4_0, 2, "Q4_0", 32, 18),
    (TensorType::Q4_1, 3, "Q4_1", 32, 20),
    (TensorType::Q5_0, 6, "Q5_0", 32, 22),
    (TensorType::Q5_1, 7, "Q5_1", 32, 24),
    (TensorType::Q8_0, 8, "Q8_0", 32, 34),
    (TensorType::Q8_1, 9, "Q8_1", 32, 36),
    (TensorType::Q2_K, 10, "Q2_K", 256, 84),
    (TensorType::Q3_K, 11, "Q3_K", 256, 110),
    (TensorType::Q4_K, 12, "Q4_K", 256, 144),
    (TensorType::Q5_K, 13, "Q5_K", 256, 176),
    (TensorType::Q6_K, 14, "Q6_K", 256, 210),
    (TensorType::Q8_K, 15, "Q8_K", 256, 292),
    (TensorType::IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (TensorType::IQ2_XS, 17, "IQ2_XS", 256, 74),
    (TensorType::IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (TensorType::IQ1_S, 19, "IQ1_S", 256, 50),
    (TensorType::IQ4_NL, 20, "IQ4_NL", 32, 18),
    (TensorType::IQ3_S, 21, "IQ3_S", 256, 110),
    (TensorType::IQ2_S, 22, "IQ2_S", 256, 82),
    (TensorType::IQ4_XS, 23, "IQ4_XS", 256, 136),
    (TensorType::I8, 24, "I8", 1, 1),
    (TensorType::I16, 25, "I16", 1, 2),
    (TensorType::I32, 26, "I32", 1, 4),
    (TensorType::I64, 27, "I64", 1, 8),
    (TensorType::F64, 28, "F64", 1, 8),
    (TensorType::IQ1_M, 29, "IQ1_M", 256, 56),
    (TensorType::BF16, 30, "BF16", 1, 2),
    (TensorType::TQ1_0, 34, "TQ1_0", 256, 54),
    (TensorType::TQ2_0, 35, "TQ2_0", 256, 66),
    (TensorType::MXFP4, 39, "MXFP4", 32, 17),
];

impl TensorType {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        TENSOR_TYPES.iter().find(|row| row.1 == code).map(|row| row.0)
    }

    fn row(self) -> &'static (TensorType, u32, &'static str, u64, u64) {
        // The table is in declaration order, which a test checks.
        &TENSOR_TYPES[self as usize]
    }

    /// The name in ggml's spelling, for example `Q4_0`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// How many numbers one block holds; 1 for plain types.
    #[must_use]
    pub fn block_size(self) -> u64 {
        self.row().3
    }

    /// How many bytes one block takes.
    #[must_use]
    pub fn block_bytes(self) -> u64 {
        self.row().4
    }

    /// Whether Hob can load tensors of this type: F32, F16, BF16, Q4_0, Q4_1 and Q8_0.
    #[must_use]
    pub fn is_loadable(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::Q4_0 | Self::Q4_1 | Self::Q8_0)
    }

    /// Whether the type packs several numbers into a block with shared scales.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        self.block_size() > 1
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_declaration_order() {
        for (index, row) in TENSOR_TYPES.iter().enumerate() {
            assert_eq!(row.0 as usize, index, "{}", row.2);
            assert_eq!(TensorType::from_code(row.1), Some(row.0));
            assert_eq!(format!("{:?}", row.0), row.2);
            assert_eq!(row.0.name(), row.2);
        }
        assert_eq!(TensorType::from_code(4), None);
    }
}
