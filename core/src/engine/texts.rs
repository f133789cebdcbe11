//! The texts of one request to embed or to rerank, on their way through the device in batches they may share with others.

use std::sync::atomic::Ordering;

use tokio::sync::oneshot;

use super::backend::Slot;
use super::request::{Link, Place};
use super::residency::Used;
use super::work::{self, Ending, Request, Task, Tell};
use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Encoding;

type Rows = Vec<Vec<f32>>;
/// What an error calls the input with this index.
pub(super) type Name = fn(usize) -> String;

struct Texts {
    slot: Slot,
    kind: work::Encoding,
    encodings: Vec<Encoding>,
    name: Name,
    rows: Rows,
    left: usize,
    link: Link,
    /// The use of the model and the place in the engine, until the terminal event.
    held: Option<(Used, Place)>,
    reply: Option<oneshot::Sender<Result<Rows>>>,
}

/// Computes the numbers of each text, in order. The use and the place end before this returns, unless the device is stuck.
pub(super) async fn compute(
    link: &Link,
    held: (Used, Place),
    kind: work::Encoding,
    encodings: Vec<Encoding>,
    name: Name,
) -> Result<Rows> {
    let (reply, answer) = oneshot::channel();
    let (slot, id) = (held.0.model.slot, held.1.id);
    let (rows, left) = (vec![Vec::new(); encodings.len()], encodings.len());
    let task = Texts { slot, kind, encodings, name, rows, left, link: link.clone(), held: Some(held), reply: Some(reply) };
    link.residency.device().add(id, Task::Encode(Box::new(task)));
    link.answer(answer).await
}

impl Request for Texts {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn interrupted(&self) -> Option<Ending> {
        let left = self.reply.as_ref().is_some_and(oneshot::Sender::is_closed);
        (left || self.link.token.is_cancelled()).then_some(Ending::Interrupted)
    }

    fn begun(&mut self) {
        self.link.begun.store(true, Ordering::Release);
    }

    fn account(&self) -> Option<Tell> {
        None
    }

    fn finish(mut self: Box<Self>, ending: Result<Ending>) {
        let result = match ending {
            Ok(Ending::Interrupted) => Err(self.link.interrupted()),
            Ok(_) => Ok(std::mem::take(&mut self.rows)),
            Err(error) => Err(error),
        };
        self.held = None;
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(result);
        }
    }
}

impl work::Encoder for Texts {
    fn kind(&self) -> work::Encoding {
        self.kind
    }

    fn lengths(&self) -> Vec<usize> {
        self.encodings.iter().map(Encoding::len).collect()
    }

    fn take(&mut self, index: usize) -> (Vec<u32>, Vec<u32>) {
        let encoding = &mut self.encodings[index];
        (std::mem::take(&mut encoding.ids), std::mem::take(&mut encoding.type_ids))
    }

    fn on_row(&mut self, index: usize, row: Vec<f32>) -> Result<bool> {
        if row.iter().any(|number| !number.is_finite()) {
            let what = match self.kind {
                work::Encoding::Embed => "the vector",
                work::Encoding::Classify => "the score",
            };
            let input = (self.name)(index);
            return Err(Error::new(ErrorKind::Backend, format!("{what} of {input} has numbers that are not finite")));
        }
        self.rows[index] = row;
        self.left -= 1;
        Ok(self.left == 0)
    }
}

impl Drop for Texts {
    /// Whoever drops the task without an end (a panic) must not leave the use behind; the caller sees the reply go.
    fn drop(&mut self) {
        self.held = None;
    }
}
