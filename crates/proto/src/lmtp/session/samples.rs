//! Turns a version 2 request into work, one for each sample (LM-973).
//!
//! Each sample is work of its own with a seed of its own, so that the engine does not have to know of samples.

use std::sync::Arc;

use bytestring::ByteString;

use super::LmtpSession;
use super::extended::ExtendedStream;
use super::text::{self, RequestSubject};
use crate::lmtp::port::StreamDemand;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{Feature, LmtpError, LmtpModelInfo, LmtpReason, ModelLookup, Score, StreamId};
use crate::steer::Token;
use crate::time::Time;

impl LmtpSession {
    /// Builds the version 2 form of a request.
    pub(super) fn extended(
        &mut self,
        word: &str,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        (name, model): (&ByteString, &Arc<LmtpModelInfo>),
        now: Time,
    ) -> Result<(Vec<StreamDemand>, Option<ExtendedStream>), LmtpError> {
        let vocabulary = models.vocabulary(name);
        let about = RequestSubject {
            name,
            model,
            vocabulary: vocabulary.as_ref(),
        };
        let (prompt, is_text) = self.prompt(members, about, now)?;
        refuse_controllers(members)?;
        let (works, numbered) = if word == "SCORE" {
            self.scores(members, about, prompt)?
        } else {
            self.generates(members, about, prompt)?
        };
        let is_text = is_text || members.value("scored_text").is_some();
        let shown = Self::shown(members, about, is_text)?;
        let (deadline, first_due) = Self::deadlines(members, now)?;
        let keep = self.keep(members, about, works.len())?;
        // LM-302 puts the context before the other members; they are few, and none of them depends on it.
        let prompt = match &works[0] {
            StreamDemand::Generate(wanted) => wanted.prompt.clone(),
            StreamDemand::Score(wanted) => wanted.prompt.clone(),
        };
        let prompt_logprobs = members.flag("prompt_logprobs")? == Some(true);
        let window = self.window(members)?;
        let resumes = self.features.has(Feature::Resume);
        let samples = u32::try_from(works.len()).unwrap_or(u32::MAX);
        let extended = ExtendedStream {
            id: id.clone(),
            features: self.features,
            request: resumes.then(|| members.digest(word)),
            window,
            samples,
            open: samples,
            numbered,
            shown,
            prompt_logprobs,
            vocabulary,
            prompt,
            sent: 0,
            cached: 0,
            fresh: true,
            began: now,
            deadline,
            first_due,
            keep,
            output: Vec::new(),
            notified: None,
            waited: false,
        };
        Ok((works, Some(extended)))
    }

    /// The works of GENERATE, and whether their items carry the sample's index.
    fn generates(
        &mut self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        prompt: Vec<Token>,
    ) -> Result<(Vec<StreamDemand>, bool), LmtpError> {
        let max = self.config.limits.max_samples;
        let n = members.integer("n", "at least 1 and not above the limit", |n| {
            (1..=i128::from(max)).contains(&n)
        })?;
        let priority = members.integer("priority", "-10 to 10", |p| (-10..=10).contains(&p))?;
        let mut work = self.work("GENERATE", members, about.model, prompt)?;
        let StreamDemand::Generate(wanted) = &mut work else {
            return Ok((vec![work], false));
        };
        wanted.priority = priority.and_then(|p| i32::try_from(p).ok()).unwrap_or(0);
        self.masked(members, about, wanted)?;
        let works = (0..n.unwrap_or(1)).zip(0..).map(|(_, index)| {
            let mut wanted = wanted.clone();
            wanted.seed = wanted.seed.map(|seed| seed.wrapping_add(index));
            StreamDemand::Generate(wanted)
        });
        Ok((works.collect(), n.is_some()))
    }

    /// The works of SCORE, in the same form.
    fn scores(
        &self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        prompt: Vec<Token>,
    ) -> Result<(Vec<StreamDemand>, bool), LmtpError> {
        let lists = text::scored(self, members, about)?;
        let numbered = members.value("scored_many").is_some();
        let top_logprobs = if self.features.has(Feature::Samples) {
            members.top_logprobs(&self.config.limits)?.unwrap_or(0)
        } else {
            0
        };
        let works = lists.into_iter().map(|scored| {
            let score = Score {
                prompt: prompt.clone(),
                scored,
                top_logprobs,
            };
            score.checked(about.model).map(StreamDemand::Score)
        });
        Ok((works.collect::<Result<_, _>>()?, numbered))
    }
}

/// Refuses a request for a controller: controllers are not supported here, and the request must not be ignored.
fn refuse_controllers(members: &PayloadMembers<'_>) -> Result<(), LmtpError> {
    if members.names_controller() {
        let message = "controllers are not supported yet";
        return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
    }
    Ok(())
}
