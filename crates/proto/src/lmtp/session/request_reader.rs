//! Reads the version 2 form of GENERATE and SCORE: the work of each sample, and the state of the stream (LM-973).
//!
//! Each sample is work of its own with a seed of its own, so that the engine does not have to know of samples.

use std::sync::Arc;

use bytestring::ByteString;

use super::buffers::{BufferRequest, Buffers};
use super::cancel::deadlines;
use super::extended::ExtendedStream;
use super::masks::Masks;
use super::steered::SteeredStream;
use super::text::RequestSubject;
use crate::lmtp::port::{Config, LmtpStats, StreamDemand};
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{
    Feature, Features, LmtpError, LmtpModelInfo, LmtpReason, ModelLookup, Score, StreamId,
};
use crate::params::PRIORITY_MOST;
use crate::steer::Token;
use crate::time::Time;

/// A GENERATE or SCORE as it was received.
#[derive(Clone, Copy)]
pub(super) struct StreamRequest<'a, 'm> {
    pub(super) word: &'a str,
    pub(super) id: &'a StreamId,
    pub(super) members: &'a PayloadMembers<'m>,
    /// The features negotiated when it was received (LM-903).
    pub(super) features: Features,
    /// Deadlines count from then, also if it has waited for its model (LM-962).
    pub(super) received: Time,
}

/// A request being read, with what it may refer to.
pub(super) struct RequestReader<'a, 'm> {
    pub(super) request: StreamRequest<'a, 'm>,
    pub(super) subject: &'a RequestSubject,
    pub(super) config: &'a Config,
    pub(super) buffers: &'a mut Buffers,
    pub(super) masks: &'a mut Masks,
    pub(super) stats: &'a mut LmtpStats,
}

impl RequestReader<'_, '_> {
    /// Reads and validates the whole request. Nothing but use counts has changed if it is refused.
    pub(super) fn read(
        mut self,
        now: Time,
    ) -> Result<(Vec<StreamDemand>, ExtendedStream), LmtpError> {
        let (members, subject) = (self.request.members, self.subject);
        let (prompt, is_text) = self.prompt(now)?;
        let (works, numbered) = if self.request.word == "SCORE" {
            self.scores(prompt)?
        } else {
            self.generates(prompt)?
        };
        let is_text = is_text || members.value("scored_text").is_some();
        let shown = subject.shown(members, is_text)?;
        let (deadline, first_due) = deadlines(members, self.request.received)?;
        let keep = BufferRequest::read(members, subject, works.len())?;
        // There is always a first work. It has passed the check of the context, which LM-302 puts after all members;
        // the members of version 2 around here are read after it, which shows only in a request with two errors.
        let prompt = match &works[0] {
            StreamDemand::Generate(wanted) => wanted.prompt.clone(),
            StreamDemand::Score(wanted) => wanted.prompt.clone(),
        };
        let prompt_logprobs = members.flag("prompt_logprobs")? == Some(true);
        let max = i128::from(self.config.limits.max_window);
        let window = members.integer("window", "at least 1 and not above the limit", |size| {
            (1..=max).contains(&size)
        })?;
        let samples = u32::try_from(works.len()).unwrap_or(u32::MAX);
        let is_steered =
            matches!(&works[0], StreamDemand::Generate(wanted) if wanted.controller.is_some());
        let extended = ExtendedStream {
            id: self.request.id.clone(),
            features: self.request.features,
            window: window.and_then(|size| u32::try_from(size).ok()),
            samples,
            open: samples,
            numbered,
            shown,
            prompt_logprobs,
            vocabulary: subject.vocabulary.clone(),
            prompt,
            steered: is_steered.then(|| SteeredStream::new(samples)),
            sent: 0,
            cached: 0,
            fresh: true,
            began: self.request.received,
            deadline,
            first_due,
            keep,
            output: Vec::new(),
            notified: None,
            waited: false,
        };
        Ok((works, extended))
    }

    /// The prompt of GENERATE or SCORE in any form, after its prefix if it has one (LM-911, LM-942), and whether it was
    /// text.
    fn prompt(&mut self, now: Time) -> Result<(Vec<Token>, bool), LmtpError> {
        let (members, subject) = (self.request.members, self.subject);
        // The prefix comes first also among errors: a client that receives `buffer_not_found` sends the full prompt,
        // and receives any other error then (LM-302).
        let prefix = self.buffers.part(members, "prefix", subject, now)?;
        let given = members.one_of(&["prompt", "prompt_text", "messages"])?;
        if members.suffix().is_some() && (prefix.is_some() || given != Some("prompt_text")) {
            let message = "'suffix' goes with 'prompt_text' alone: leave out 'suffix', or 'prompt', 'messages' and 'prefix'";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let continues = prefix.as_ref().is_some_and(|prefix| !prefix.is_empty());
        let (own, is_text) = match given {
            // Behind a prefix the text does not begin, so no BOS is added to it.
            Some("prompt_text") => (subject.prompt_text(members, !continues)?, true),
            Some("messages") => (subject.messages(members)?, true),
            None if prefix.is_some() => (Vec::new(), false),
            _ => (members.tokens("prompt", &subject.model)?, false),
        };
        let Some(mut prompt) = prefix else {
            return Ok((own, is_text));
        };
        prompt.extend(own);
        Ok((prompt, is_text))
    }

    /// The works of GENERATE, and whether their items carry the sample's index.
    fn generates(&mut self, prompt: Vec<Token>) -> Result<(Vec<StreamDemand>, bool), LmtpError> {
        let (members, subject) = (self.request.members, self.subject);
        let max = self.config.limits.max_samples;
        let n = members.integer("n", "at least 1 and not above the limit", |n| {
            (1..=i128::from(max)).contains(&n)
        })?;
        let most = i128::from(PRIORITY_MOST);
        let priority = members.integer("priority", "-10 to 10", |p| (-most..=most).contains(&p))?;
        let mut work = work(
            self.request.word,
            members,
            &subject.model,
            self.config,
            self.stats,
            prompt,
        )?;
        let StreamDemand::Generate(wanted) = &mut work else {
            return Ok((vec![work], false));
        };
        wanted.params.priority = priority.map_or(Some(0), |p| i32::try_from(p).ok());
        self.masks.apply(members, subject, wanted)?;
        wanted.controller = read::controller(members, &self.config.limits)?.map(Arc::new);
        let samples = n.and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
        self.can_copy(&wanted.prompt, samples)?;
        // The model would give each sample the same default.
        wanted.params.seed = wanted.params.seed.or(subject.model.default_seed);
        let works = (0..samples).zip(0..).map(|(_, index)| {
            let mut wanted = wanted.clone();
            // LM-973: seed + i. It wraps, because every 64-bit number is a seed.
            wanted.params.seed = wanted.params.seed.map(|seed| seed.wrapping_add(index));
            StreamDemand::Generate(wanted)
        });
        // With `n` the items carry the index even if `n` is 1: the client reads them as samples (LM-973).
        Ok((works.collect(), n.is_some()))
    }

    /// Checks the prompts of all samples together. Each sample has a copy, so a short message could cost a lot.
    fn can_copy(&self, prompt: &[Token], samples: usize) -> Result<(), LmtpError> {
        let max = self.config.limits.max_sample_tokens;
        if samples == 1 || prompt.len().saturating_mul(samples) <= max {
            return Ok(());
        }
        let message =
            format!("the prompts of all samples must have at most {max} tokens; ask for fewer");
        Err(LmtpError::new(LmtpReason::InvalidValue, message))
    }

    /// The works of SCORE, in the same form.
    fn scores(&self, prompt: Vec<Token>) -> Result<(Vec<StreamDemand>, bool), LmtpError> {
        let (members, subject) = (self.request.members, self.subject);
        let lists = subject.scored(members)?;
        self.can_copy(&prompt, lists.len())?;
        let numbered = members.value("scored_many").is_some();
        // Base clients may send the member with SCORE, where it is ignored (LM-311).
        let (name, most) = ("top_logprobs", self.config.limits.max_top_logprobs);
        let top_logprobs = match members.value(name) {
            Some(value) if self.request.features.has(Feature::Samples) => {
                read::count(name, value, 0, most)?
            }
            _ => 0,
        };
        let lora = read::lora(members)?;
        let works = lists.into_iter().map(|scored| {
            let score = Score {
                prompt: prompt.clone(),
                scored,
                top_logprobs,
                lora: lora.clone(),
            };
            score.checked(&subject.model).map(StreamDemand::Score)
        });
        Ok((works.collect::<Result<_, _>>()?, numbered))
    }
}

/// The work of a request with this prompt, without its samples.
pub(super) fn work(
    word: &str,
    members: &PayloadMembers<'_>,
    model: &LmtpModelInfo,
    config: &Config,
    stats: &mut LmtpStats,
    prompt: Vec<Token>,
) -> Result<StreamDemand, LmtpError> {
    if word == "SCORE" {
        return Ok(StreamDemand::Score(read::score(members, model, prompt)?));
    }
    // Counted before the other members are validated: a refused request shows what clients send as well.
    stats.unknown_parameters += members.unknown();
    let (limits, strict) = (&config.limits, config.strict_parameters);
    let generate = read::generate(members, model, limits, strict, prompt)?;
    Ok(StreamDemand::Generate(generate))
}

/// The model that a request is about, with the name for it in the request.
pub(super) fn model(
    members: &PayloadMembers<'_>,
    models: &dyn ModelLookup,
    config: &Config,
) -> Result<(ByteString, Arc<LmtpModelInfo>), LmtpError> {
    let name = model_name(members, config)?;
    let model = models.find(&name).map_err(LmtpError::model)?;
    Ok((name, model))
}

/// The model's name in the request, or the default.
pub(super) fn model_name(
    members: &PayloadMembers<'_>,
    config: &Config,
) -> Result<ByteString, LmtpError> {
    let named = members.model(&config.limits)?;
    let named = named.map(|name| ByteString::from(&*name));
    named
        .or_else(|| config.default_model.clone())
        .ok_or_else(|| {
            let message = "'model' is required: the name of a model";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })
}

/// Refuses a request for a controller or a suffix without the feature. Unknown members are ignored, but without its
/// controller the output would be unconstrained, and without its suffix another text.
pub(super) fn refuse_unagreed(members: &PayloadMembers<'_>) -> Result<(), LmtpError> {
    if let Some((member, feature)) = members.unagreed() {
        let feature = feature.name();
        let message = format!("'{member}' needs the feature '{feature}'; negotiate it first");
        return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
    }
    Ok(())
}
