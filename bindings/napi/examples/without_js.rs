//! The Rust side of npm/bench/run.mjs: the same calls on the same scripted device, without JavaScript. A worker: each line of standard
//! input names a measurement and its rounds, each line of standard output is the times in microseconds, as JSON.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark fails by panicking, and prints")]

use std::io::stdin;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use hob::block_on;
use hob::engine::{EmbedRequest, Engine, EngineOptions, Event, GenerateRequest};
use hob::fake::{FakeDevice, FakeModel, Point};
use hob::model::ModelKind;

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

fn embed(engine: &Engine) -> f64 {
    let began = Instant::now();
    block_on(engine.embed(EmbedRequest::new("embedder", ["a"]))).unwrap();
    micros(began)
}

/// A thread that does nothing but answer: what floor.rs is for JavaScript.
fn echo(rounds: usize, apart: Duration) -> Vec<f64> {
    let ((ask, asked), (answer, answered)) = (channel(), channel());
    thread::spawn(move || asked.iter().for_each(|()| answer.send(()).unwrap_or(())));
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let began = Instant::now();
        ask.send(()).unwrap();
        answered.recv().unwrap();
        times.push(micros(began));
        thread::sleep(apart);
    }
    times
}

/// A whole answer, made as fast as the device can: per token.
fn burst(engine: &Engine) -> f64 {
    let (began, mut tokens) = (Instant::now(), 0usize);
    let mut stream = engine.generate(GenerateRequest::raw("long", "x")).unwrap();
    while let Some(event) = block_on(stream.next()) {
        if let Event::Chunk(chunk) = event.unwrap() {
            tokens += chunk.token_ids.len();
        }
    }
    #[allow(clippy::cast_precision_loss)]
    let tokens = tokens as f64;
    micros(began) / tokens
}

/// From the moment the device may make a token until the reader has it.
fn paced(engine: &Engine, device: &FakeDevice, rounds: usize) -> Vec<f64> {
    device.hold(Point::Step);
    let mut stream = engine.generate(GenerateRequest::raw("long", "x")).unwrap();
    // The first token comes with the prompt.
    block_on(stream.next()).unwrap().unwrap();
    device.wait_until_held(Point::Step);
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let began = Instant::now();
        device.pass(Point::Step);
        block_on(stream.next()).unwrap().unwrap();
        times.push(micros(began));
        device.wait_until_held(Point::Step);
        // As between a model's tokens: who hurries on finds every processor awake.
        thread::sleep(Duration::from_millis(1));
    }
    drop(stream);
    device.release(Point::Step);
    times
}

fn main() {
    let mut long = FakeModel::new("long", ModelKind::Chat, 1);
    long.reply = "x".repeat(3000);
    let device = FakeDevice::new(vec![FakeModel::new("embedder", ModelKind::Embedder, 1), long]);
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(1000)).unwrap();
    for line in stdin().lines() {
        let line = line.unwrap();
        let (what, rounds) = line.split_once(' ').unwrap();
        let rounds: usize = rounds.parse().unwrap();
        let times: Vec<f64> = match what {
            "embed" => (0..rounds).map(|_| embed(&engine)).collect(),
            "echo" => echo(rounds, Duration::ZERO),
            "echo-alone" => echo(rounds, Duration::from_millis(1)),
            "burst" => (0..rounds).map(|_| burst(&engine)).collect(),
            _ => paced(&engine, &device, rounds),
        };
        println!("{}", serde_json::to_string(&times).unwrap());
    }
}
