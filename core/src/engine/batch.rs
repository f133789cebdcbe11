//! How inputs of embed and rerank are grouped: by length, under a row and a slot limit, so that little is spent on padding and
//! memory is bounded (spec 5.2). Pure arithmetic, no tensors.

/// Rows of one batch at most.
pub(crate) const MAX_ROWS: usize = 16;
/// Padded token slots (rows times the longest row) of one batch at most; a single longer row runs alone.
pub(crate) const MAX_SLOTS: usize = 8192;

/// Groups the rows with these lengths into batches of indices, each within both limits. Longest first, so that the largest
/// batch comes when memory is emptiest and the later ones reuse its buffers.
pub(crate) fn plan(lengths: &[usize], max_rows: usize, max_slots: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(lengths[index]), index));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match batches.last_mut() {
            Some(batch) if batch.len() < max_rows && (batch.len() + 1) * lengths[batch[0]] <= max_slots => batch.push(index),
            _ => batches.push(vec![index]),
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_row_over_the_slot_limit_runs_alone() {
        // Hazard I15: an input over the cap must not loop or be lost.
        assert_eq!(plan(&[10, 9000, 10], 16, 8192), vec![vec![1], vec![0, 2]]);
    }

    proptest! {
        #[test]
        fn every_row_is_in_exactly_one_batch_within_the_limits(lengths in proptest::collection::vec(1usize..600, 0..100), rows in 1usize..20, slots in 1usize..4096) {
            let batches = plan(&lengths, rows, slots);
            let mut seen: Vec<usize> = batches.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            for batch in &batches {
                let longest = batch.iter().map(|&i| lengths[i]).max().unwrap();
                prop_assert!(batch.len() <= rows);
                prop_assert!(batch.len() == 1 || batch.len() * longest <= slots);
            }
        }
    }
}
