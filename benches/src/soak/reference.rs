//! [`SoakReference`]: the answers that requests have when they run alone.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio::sync::{Mutex, OnceCell};

use super::answer::SoakAnswer;
use super::client::timed;
use super::question::SoakQuestion;
use crate::generate::waves::answer;
use crate::side::Side;

/// A second server, which answers one request at a time and keeps no prefixes, and its answers.
#[derive(Debug)]
pub struct SoakReference {
    side: Side,
    answers: Mutex<HashMap<SoakQuestion, Arc<OnceCell<Arc<SoakAnswer>>>>>,
    /// Held while the server answers.
    turn: Mutex<()>,
}

impl SoakReference {
    /// A table without answers.
    #[must_use]
    pub fn new(side: Side) -> Self {
        Self {
            side,
            answers: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// Returns the answer to a question, each of which is computed once.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn answer(&self, question: &SoakQuestion) -> Result<Arc<SoakAnswer>> {
        let cell = Arc::clone(
            self.answers
                .lock()
                .await
                .entry(question.clone())
                .or_default(),
        );
        let found = cell.get_or_try_init(|| async {
            let _turn = self.turn.lock().await;
            // Of random tokens, any other may be right.
            let others = if question.is_sampled() { 0 } else { CANDIDATES };
            let body = question.body(Some(others));
            let answer = answer(self.side.server.address, self.side.path, &body);
            let answer = SoakAnswer::read(&timed(answer).await?.reply)?;
            ensure!(answer.has_logprobs(), "no log-probabilities: {body}");
            Ok::<_, anyhow::Error>(Arc::new(answer))
        });
        let found = found.await.context("the reference")?;
        Ok(Arc::clone(found))
    }

    /// How many questions were answered.
    pub async fn questions(&self) -> usize {
        self.answers.lock().await.len()
    }
}

/// Candidates of each token, one of which another answer may have taken.
const CANDIDATES: u32 = 6;
