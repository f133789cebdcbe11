#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn options() -> SamplingOptions {
    SamplingOptions { temperature: 1.0, seed: Some(7), ..SamplingOptions::default() }
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - max) / temperature).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    u32::try_from((0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap()).unwrap()
}

/// Draws many times and checks the frequencies by chi-square; 4 standard deviations over the mean.
fn check_distribution(options: &SamplingOptions, logits: &[f32], expected: &[f64]) {
    const DRAWS: u32 = 40_000;
    let mut sampler = Sampler::new(options, logits.len()).unwrap();
    let mut counts = vec![0_u32; logits.len()];
    for _ in 0..DRAWS {
        counts[sampler.sample(logits, &[]).unwrap() as usize] += 1;
    }
    let mut chi = 0.0;
    let mut freedom = -1.0_f64;
    for (count, p) in counts.iter().zip(expected) {
        let wanted = p * f64::from(DRAWS);
        if *p <= 0.0 {
            assert_eq!(*count, 0, "a token that was cut is never drawn");
        } else {
            chi += (f64::from(*count) - wanted).powi(2) / wanted;
            freedom += 1.0;
        }
    }
    assert!(chi < freedom + 4.0 * (2.0 * freedom).sqrt() + 4.0, "chi-square {chi} of {freedom}: {counts:?}");
}

fn renormalised(mut p: Vec<f64>, keep: impl Fn(usize, f64) -> bool) -> Vec<f64> {
    for (index, value) in p.iter_mut().enumerate() {
        if !keep(index, *value) {
            *value = 0.0;
        }
    }
    let sum: f64 = p.iter().sum();
    p.into_iter().map(|value| value / sum).collect()
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0, f32::NEG_INFINITY];
    check_distribution(&options(), &logits, &softmax(&logits, 1.0));
    check_distribution(&SamplingOptions { temperature: 0.5, ..options() }, &logits, &softmax(&logits, 0.5));
    check_distribution(&SamplingOptions { temperature: 3.0, ..options() }, &logits, &softmax(&logits, 3.0));
}

#[test]
fn cuts_leave_the_rest_in_proportion() {
    let logits = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 0.25];
    let p = softmax(&logits, 1.0);
    let top_k = renormalised(p.clone(), |index, _| [3, 0, 4].contains(&index));
    check_distribution(&SamplingOptions { top_k: 3, ..options() }, &logits, &top_k);
    // The two likeliest hold 0.69, so 0.7 takes the third in.
    assert!(p[3] + p[0] < 0.7 && p[3] + p[0] + p[4] > 0.7);
    check_distribution(&SamplingOptions { top_p: 0.7, ..options() }, &logits, &top_k);
    let least = p[3] * 0.15;
    let min_p = renormalised(p.clone(), |_, value| value >= least);
    check_distribution(&SamplingOptions { min_p: 0.15, ..options() }, &logits, &min_p);
    // Temperature comes first: a hotter softmax is flatter, so min_p cuts less.
    let hot = softmax(&logits, 2.0);
    let least = hot.iter().copied().fold(0.0, f64::max) * 0.3;
    let hot = renormalised(hot, |_, value| value >= least);
    check_distribution(&SamplingOptions { temperature: 2.0, min_p: 0.3, ..options() }, &logits, &hot);
}

#[test]
fn greedy_takes_the_first_of_the_likeliest_and_no_random_numbers() {
    // E11.
    let logits = [0.0, 3.0, 1.0, 3.0];
    for temperature in [0.0, 1e-6] {
        for seed in 0..20 {
            let mut sampler = Sampler::new(&SamplingOptions { temperature, seed: Some(seed), ..options() }, 4).unwrap();
            assert_eq!(sampler.sample(&logits, &[]).unwrap(), 1);
        }
    }
    // Just above the border it is as good as greedy, and finite.
    let mut sampler = Sampler::new(&SamplingOptions { temperature: 2e-5, ..options() }, 4).unwrap();
    assert_eq!(sampler.sample(&[0.0, 5.0, 4.9, -1e30], &[]).unwrap(), 1);
    let mut sampler = Sampler::new(&SamplingOptions { top_k: 1, ..options() }, 4).unwrap();
    assert_eq!(sampler.sample(&logits, &[]).unwrap(), 1);
}

#[test]
fn a_seed_gives_the_same_tokens_everywhere() {
    #[allow(clippy::cast_precision_loss)]
    let logits: Vec<f32> = (0..1000).map(|index| ((index * 37) % 101) as f32 / 25.0).collect();
    let run = |seed| {
        let mut sampler = Sampler::new(&SamplingOptions { seed: Some(seed), ..options() }, 1000).unwrap();
        (0..20).map(|_| sampler.sample(&logits, &[]).unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    // Frozen, so that a change of the generator is noticed.
    assert_eq!(run(42)[..8], FROZEN);
    let drawn = Sampler::new(&SamplingOptions { seed: None, ..options() }, 10).unwrap().seed();
    let again = Sampler::new(&SamplingOptions { seed: None, ..options() }, 10).unwrap().seed();
    assert_ne!(drawn, again);
    let mut first = Sampler::new(&SamplingOptions { seed: Some(drawn), ..options() }, 1000).unwrap();
    let mut second = Sampler::new(&SamplingOptions { seed: Some(drawn), ..options() }, 1000).unwrap();
    assert_eq!(first.sample(&logits, &[]).unwrap(), second.sample(&logits, &[]).unwrap());
}

const FROZEN: [u32; 8] = [529, 543, 636, 408, 35, 417, 737, 851];

#[test]
fn the_penalty_counts_each_recent_token_once() {
    let greedy = |penalty, window, recent: &[u32], logits: &[f32]| {
        let options = SamplingOptions { repetition_penalty: penalty, repetition_window: window, ..SamplingOptions::default() };
        Sampler::new(&options, logits.len()).unwrap().sample(logits, recent).unwrap()
    };
    let logits = [2.0, 1.5, -1.0];
    assert_eq!(greedy(1.0, 64, &[0], &logits), 0);
    assert_eq!(greedy(1.2, 64, &[0, 0, 0, 0], &logits), 0, "2.0 / 1.2 is still more than 1.5, however often");
    assert_eq!(greedy(1.5, 64, &[0], &logits), 1);
    assert_eq!(greedy(1.5, 2, &[0, 9, 9], &logits), 0, "out of the window, and ids outside the vocabulary are harmless");
    assert_eq!(greedy(1.5, 0, &[0, 9, 9, 9, 9], &logits), 1, "0 means all");
    assert_eq!(greedy(0.5, 64, &[1], &logits), 1, "below 1 it favours");
    assert_eq!(greedy(3.0, 64, &[1], &[-2.0, -1.0]), 0, "negative logits are multiplied");
    let mut sampler = Sampler::new(&SamplingOptions { repetition_penalty: 1.5, ..SamplingOptions::default() }, 3).unwrap();
    for _ in 0..5 {
        assert_eq!(sampler.sample(&logits, &[0]).unwrap(), 1, "each draw starts from the model's logits");
    }
}

#[test]
fn broken_logits_are_typed() {
    for temperature in [0.0, 1.0] {
        let options = SamplingOptions { temperature, ..options() };
        let mut sampler = Sampler::new(&options, 3).unwrap();
        let inf = f32::INFINITY;
        for logits in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, f32::NAN], [-inf; 3], [inf, 0.0, 0.0]] {
            assert_eq!(sampler.sample(&logits, &[]).unwrap_err().kind(), ErrorKind::Backend, "{logits:?}");
            assert_eq!(logprobs(&logits, 0, 1).unwrap_err().kind(), ErrorKind::Backend);
        }
        assert_eq!(sampler.sample(&[-inf, -inf, -5.0], &[]).unwrap(), 2);
        assert_eq!(sampler.sample(&[f32::MAX, f32::MIN, f32::MIN], &[]).unwrap(), 0);
        assert_eq!(sampler.sample(&[1.0], &[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(Sampler::new(&options(), 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let bad = SamplingOptions { top_p: 0.0, ..options() };
    assert_eq!(Sampler::new(&bad, 3).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(logprobs(&[1.0], 1, 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn logprobs_come_from_the_raw_logits() {
    // E12.
    let logits = [1000.0, 1001.0, 1001.0, -5000.0, f32::NEG_INFINITY];
    let all = logprobs(&logits, 3, 10).unwrap();
    let p = softmax(&logits, 1.0);
    assert_eq!(all.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 0, 3]);
    for (id, logprob) in &all.top[..3] {
        assert!((f64::from(*logprob) - p[*id as usize].ln()).abs() < 1e-6);
    }
    assert!((all.logprob + 6001.86).abs() < 0.01);
    assert_eq!(logprobs(&logits, 0, 0).unwrap().top, []);
    assert_eq!(logprobs(&logits, 0, 2).unwrap().top.len(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn a_draw_is_among_what_the_cuts_leave(
        logits in prop::collection::vec(-8.0_f32..8.0, 1..300),
        temperature in 0.05_f32..3.0, top_k in 0_u32..40, top_p in 0.01_f32..=1.0, min_p in 0.0_f32..0.9, seed: u64,
    ) {
        let options = SamplingOptions { temperature, top_k, top_p, min_p, seed: Some(seed), ..SamplingOptions::default() };
        // The same by sorting everything.
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if top_k > 0 {
            order.truncate(top_k as usize);
        }
        let max = logits[order[0]];
        let weight = |at: usize| (f64::from(logits[at] - max) / f64::from(temperature)).exp();
        let total: f64 = order.iter().map(|at| weight(*at)).sum();
        let mut sum = 0.0;
        // A hair of room for sums taken in another order.
        let most = order.iter().take_while(|at| { let more = sum < (f64::from(top_p) + 1e-9) * total; sum += weight(**at); more }).count();
        order.truncate(most);
        let mut sampler = Sampler::new(&options, logits.len()).unwrap();
        let drawn: Vec<u32> = (0..30).map(|_| sampler.sample(&logits, &[]).unwrap()).collect();
        for token in &drawn {
            let token = *token as usize;
            prop_assert!(order.contains(&token) && weight(token) >= f64::from(min_p) - 1e-9);
        }
        let mut again = Sampler::new(&options, logits.len()).unwrap();
        let repeated: Vec<u32> = (0..30).map(|_| again.sample(&logits, &[]).unwrap()).collect();
        prop_assert_eq!(drawn, repeated);
    }

    #[test]
    fn top_p_keeps_the_smallest_set(logits in prop::collection::vec(-8.0_f32..8.0, 1..400), top_p in 0.01_f64..0.999) {
        let mut kept: Vec<(u32, f64)> = (0_u32..).zip(softmax(&logits, 1.0)).collect();
        let all = kept.clone();
        keep_top_p(&mut kept, top_p);
        let sum: f64 = kept.iter().map(|(_, weight)| weight).sum();
        prop_assert!(sum >= top_p - 1e-9, "enough");
        let least = kept.iter().map(|(_, weight)| *weight).fold(f64::INFINITY, f64::min);
        prop_assert!(sum - least < top_p + 1e-9, "not one too many");
        prop_assert!(all.iter().all(|token| token.1 <= least || kept.contains(token)), "none likelier is left out");
    }

    #[test]
    fn top_k_keeps_the_likeliest(logits in prop::collection::vec((-4_i16..4).prop_map(f32::from), 1..400), count in 0_usize..300) {
        let mut kept = Vec::new();
        keep_top_k(&logits, count, &mut kept);
        kept.sort_unstable_by_key(|(id, _)| *id);
        let mut order: Vec<u32> = (0..u32::try_from(logits.len()).unwrap()).collect();
        order.sort_by(|a, b| descending(logits[*a as usize], logits[*b as usize]));
        order.truncate(count);
        order.sort_unstable();
        prop_assert_eq!(kept.iter().map(|(id, _)| *id).collect::<Vec<_>>(), order);
    }

    #[test]
    fn cold_is_greedy(logits in prop::collection::vec(-8.0_f32..8.0, 1..300), seed: u64) {
        for temperature in [0.0, 1e-6] {
            let options = SamplingOptions { temperature, top_p: 0.9, seed: Some(seed), ..SamplingOptions::default() };
            prop_assert_eq!(Sampler::new(&options, logits.len()).unwrap().sample(&logits, &[]).unwrap(), argmax(&logits));
        }
    }
}

#[test]
fn a_large_vocabulary_is_quick() {
    #[allow(clippy::cast_precision_loss)]
    let logits: Vec<f32> = (0_u32..152_064).map(|index| (index.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6).collect();
    let recent: Vec<u32> = (0..64).collect();
    for options in [
        SamplingOptions { ..options() },
        SamplingOptions { top_k: 40, top_p: 0.95, repetition_penalty: 1.1, ..options() },
        SamplingOptions { top_p: 0.9, ..options() },
        SamplingOptions { min_p: 0.05, ..options() },
    ] {
        let mut sampler = Sampler::new(&options, logits.len()).unwrap();
        let start = std::time::Instant::now();
        for _ in 0..3 {
            sampler.sample(&logits, &recent).unwrap();
        }
        let each = start.elapsed() / 3;
        // Unoptimised test builds; optimised ones take a small part of it.
        assert!(each.as_millis() < 5000, "{options:?}: {each:?}");
    }
}
