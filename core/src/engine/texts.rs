//! The texts of one request to embed or to rerank, on their way through the device in batches they may share with others.

use super::backend::Slot;
use super::request::{Link, Place, Reply};
use super::residency::Used;
use super::work::{self, Ending, Request, Task, Tell};
use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Encoding;

type Rows = Vec<Vec<f32>>;
/// What an error calls the input with this index.
pub(super) type Name = fn(usize) -> String;

struct Texts {
    kind: work::Encoding,
    encodings: Vec<Encoding>,
    name: Name,
    rows: Rows,
    left: usize,
    reply: Reply<Rows>,
}

/// Computes the numbers of each text, in order. The use and the place end before this returns, unless the device is stuck.
pub(super) async fn compute(
    link: &Link,
    held: (Used, Place),
    kind: work::Encoding,
    encodings: Vec<Encoding>,
    name: Name,
) -> Result<Rows> {
    let (reply, answer) = Reply::new(link, held);
    let (rows, left) = (vec![Vec::new(); encodings.len()], encodings.len());
    link.residency.device().add(reply.id(), Task::Encode(Box::new(Texts { kind, encodings, name, rows, left, reply })));
    link.answer(answer).await
}

impl Request for Texts {
    fn slot(&self) -> Slot {
        self.reply.model().slot
    }

    fn interrupted(&self) -> Option<Ending> {
        self.reply.interrupted()
    }

    fn begun(&mut self) {
        self.reply.begun();
    }

    fn account(&self) -> Option<Tell> {
        None
    }

    fn finish(self: Box<Self>, ending: Result<Ending>) {
        self.reply.send(ending, self.rows);
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
