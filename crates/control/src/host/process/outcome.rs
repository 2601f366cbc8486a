//! The outcome of a callback as bytes, from a controller's process to the runtime.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, SharedMask, StepReport, Token};

use super::bytes::{ByteReader, ByteWriter};
use super::message::OUTCOME;
use crate::host::controller::Outcome;
use crate::host::failure::CallFailure;
use crate::host::group::{VariablesLimits, Waiting};
use crate::host::log::LOG_BYTES_MAX;
use crate::host::result::{
    MidReturned, ResultLimits, Returned, ReturnedBranch, ReturnedSplice, SPLICES_MAX,
    TEMPERATURE_MAX, TOKENS_MAX, Waits,
};
use crate::host::state::MASKS_MAX;

/// What a callback returned and printed. What it wrote the runtime knows itself.
pub(super) fn write_outcome(outcome: &Outcome) -> Vec<u8> {
    let mut message = ByteWriter::of_kind(OUTCOME);
    message
        .bytes(outcome.report.logs.as_bytes())
        .long(outcome.report.micros);
    match &outcome.result {
        Err(failure) => {
            message
                .byte(0)
                .bytes(failure.reason.name().as_bytes())
                .bytes(failure.message.as_bytes())
                .size(failure.log_bytes());
        }
        Ok(Returned::Begun { prompt }) => {
            message
                .byte(1)
                .optional(prompt.as_ref(), |message, prompt| {
                    message.words(prompt);
                });
        }
        Ok(Returned::Pre {
            num_forks,
            suspend,
            ff_tokens,
            wait,
        }) => {
            message
                .byte(2)
                .word(*num_forks)
                .flag(*suspend)
                .words(ff_tokens);
            write_wait(&mut message, wait.as_ref());
        }
        Ok(Returned::Mid(MidReturned::Stop)) => {
            message.byte(3);
        }
        Ok(Returned::Mid(MidReturned::Sample(mask))) => {
            message.byte(4).optional(mask.as_ref(), |message, mask| {
                message.words(mask.words());
            });
        }
        Ok(Returned::Mid(MidReturned::Splice {
            backtrack,
            ff_tokens,
        })) => {
            message.byte(5).word(*backtrack).words(ff_tokens);
        }
        Ok(Returned::Post { stop }) => {
            message.byte(6).flag(*stop);
        }
        Ok(Returned::Branches(branches)) => write_branches(message.byte(7), branches),
    }
    message.finish()
}

/// The runtime knows all but the names: whose they are, and since when it waits.
fn write_wait(message: &mut ByteWriter, wait: Option<&Waiting>) {
    message.optional(wait, |message, wait| {
        message.size(wait.names().len());
        for name in wait.names() {
            message.bytes(name.as_bytes());
        }
    });
}

/// Branches may share a mask, which is sent once.
fn write_branches(message: &mut ByteWriter, branches: &[ReturnedBranch]) {
    let mut masks: Vec<&SharedMask> = Vec::new();
    let mut places = Vec::with_capacity(branches.len());
    for branch in branches {
        places.push(branch.mask.as_ref().map(|mask| {
            let known = masks.iter().position(|known| Arc::ptr_eq(known, mask));
            known.unwrap_or_else(|| {
                masks.push(mask);
                masks.len() - 1
            })
        }));
    }
    message.size(masks.len());
    for mask in masks {
        message.words(mask.words());
    }
    message.size(branches.len());
    for (branch, place) in branches.iter().zip(places) {
        message
            .optional(place, |message, place| {
                message.size(place);
            })
            .optional(branch.temperature, |message, temperature| {
                message.word(temperature.to_bits());
            })
            .size(branch.splices.len());
        for splice in &branch.splices {
            message
                .words(&splice.when_sampled)
                .word(splice.backtrack)
                .words(&splice.ff_tokens);
        }
        write_wait(message, branch.wait.as_ref());
    }
}

/// Reads an outcome; `None` if no controller's process would send it.
pub(super) fn read_outcome(
    message: &[u8],
    limits: ResultLimits,
    waits: &Waits<'_>,
) -> Option<Outcome> {
    let mut reader = ByteReader::new(message);
    let logs = reader.text()?;
    // Each byte that is no text may have become three.
    if logs.len() > 3 * LOG_BYTES_MAX {
        return None;
    }
    let report = StepReport {
        logs: logs.to_owned(),
        storage: Vec::new(),
        micros: reader.long()?,
    };
    let result = match reader.byte()? {
        0 => Err(read_failure(&mut reader)?),
        kind => Ok(read_returned(kind, &mut reader, limits, waits)?),
    };
    reader.end()?;
    Some(Outcome { result, report })
}

fn read_failure(reader: &mut ByteReader<'_>) -> Option<CallFailure> {
    let reason = reader.text()?;
    let reason = REASONS.into_iter().find(|known| known.name() == reason)?;
    let message = reader.text()?;
    if message.len() > MESSAGE_BYTES_MAX {
        return None;
    }
    CallFailure::with_log(reason, message.to_owned(), reader.size()?)
}

fn read_returned(
    kind: u8,
    reader: &mut ByteReader<'_>,
    limits: ResultLimits,
    waits: &Waits<'_>,
) -> Option<Returned> {
    let vocabulary = limits.vocabulary;
    Some(match kind {
        1 => Returned::Begun {
            prompt: reader.optional(|reader| reader.tokens(vocabulary))?,
        },
        2 => Returned::Pre {
            num_forks: forks(reader, limits)?,
            suspend: reader.flag()?,
            ff_tokens: tokens(reader, &mut 0, vocabulary)?,
            wait: read_wait(reader, waits)?,
        },
        3 => Returned::Mid(MidReturned::Stop),
        4 => Returned::Mid(MidReturned::Sample(
            reader.optional(|reader| mask(reader, vocabulary))?,
        )),
        5 => Returned::Mid(MidReturned::Splice {
            backtrack: reader.word()?,
            ff_tokens: tokens(reader, &mut 0, vocabulary)?,
        }),
        6 => Returned::Post {
            stop: reader.flag()?,
        },
        7 => Returned::Branches(read_branches(reader, limits, waits)?),
        _ => return None,
    })
}

fn forks(reader: &mut ByteReader<'_>, limits: ResultLimits) -> Option<u32> {
    let forks = reader.word()?;
    (forks as usize <= limits.branches).then_some(forks)
}

/// Tokens of a result that has `so_far` of them.
fn tokens(
    reader: &mut ByteReader<'_>,
    so_far: &mut usize,
    vocabulary: usize,
) -> Option<Vec<Token>> {
    let tokens = reader.tokens(vocabulary)?;
    *so_far += tokens.len();
    (*so_far <= TOKENS_MAX).then_some(tokens)
}

fn mask(reader: &mut ByteReader<'_>, vocabulary: usize) -> Option<SharedMask> {
    Mask::from_words(reader.words()?, vocabulary).map(Arc::new)
}

fn read_wait(reader: &mut ByteReader<'_>, waits: &Waits<'_>) -> Option<Option<Waiting>> {
    let names = reader.optional(|reader| {
        let number = reader.size()?;
        // Not reserved in advance: the number is believed only as far as bytes follow.
        let names = (0..number).map(|_| reader.text().map(str::to_owned));
        names.collect::<Option<Vec<_>>>()
    })?;
    waits.read(names).ok()
}

fn read_branches(
    reader: &mut ByteReader<'_>,
    limits: ResultLimits,
    waits: &Waits<'_>,
) -> Option<Vec<ReturnedBranch>> {
    let number = reader.size()?;
    let masks = (0..number.min(MASKS_MAX + 1)).map(|_| mask(reader, limits.vocabulary));
    let masks: Vec<_> = masks.collect::<Option<_>>()?;
    let number = reader.size()?;
    if masks.len() > MASKS_MAX || number > limits.branches {
        return None;
    }
    let mut so_far = 0;
    let branch = |_| {
        let place = reader.optional(ByteReader::size)?;
        let mask = match place {
            Some(place) => Some(Arc::clone(masks.get(place)?)),
            None => None,
        };
        let temperature = reader.optional(ByteReader::word)?.map(f32::from_bits);
        if temperature.is_some_and(|heat| !(0.0..=TEMPERATURE_MAX).contains(&heat)) {
            return None;
        }
        let splices = reader.size()?;
        if splices > SPLICES_MAX {
            return None;
        }
        let splices = (0..splices).map(|_| {
            Some(ReturnedSplice {
                when_sampled: tokens(reader, &mut so_far, limits.vocabulary)?,
                backtrack: reader.word()?,
                ff_tokens: tokens(reader, &mut so_far, limits.vocabulary)?,
            })
        });
        Some(ReturnedBranch {
            mask,
            temperature,
            splices: splices.collect::<Option<_>>()?,
            wait: read_wait(reader, waits)?,
        })
    };
    (0..number).map(branch).collect()
}

/// The reasons for which callbacks fail (AI-932).
const REASONS: [ErrorReason; 8] = [
    ErrorReason::CONSTRAINT_FAILED,
    ErrorReason::TRAP,
    ErrorReason::TIMEOUT,
    ErrorReason::MEMORY,
    ErrorReason::FUEL,
    ErrorReason::INIT,
    ErrorReason::BAD_RESULT,
    ErrorReason::LIMIT,
];
/// A log, a backtrace with names of functions, and a text.
const MESSAGE_BYTES_MAX: usize = 4 * LOG_BYTES_MAX;

/// What a message of a controller's process may have: masks of a branch each, or a prompt as long as any, or a
/// variable.
pub(super) fn bytes_max(limits: ResultLimits, variables: &VariablesLimits) -> usize {
    let masks = limits.branches.min(MASKS_MAX) * (limits.vocabulary.div_ceil(8) + 16);
    masks + variables.value_bytes + 8 * MESSAGE_BYTES_MAX + PROMPT_BYTES_MAX
}

/// A replaced prompt: four bytes for each token of a result of `result_bytes` and of the prompt.
const PROMPT_BYTES_MAX: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::group::Group;

    const LIMITS: ResultLimits = ResultLimits {
        vocabulary: 100,
        branches: 4,
    };

    fn every(waits: &Waits<'_>) -> Vec<Result<Returned, CallFailure>> {
        let mask = |token| {
            let mut mask = Mask::none(100);
            mask.allow(token);
            Some(Arc::new(mask))
        };
        let shared = mask(7);
        let branch = |mask, temperature, ff_tokens: &[u32]| ReturnedBranch {
            mask,
            temperature,
            splices: vec![ReturnedSplice {
                when_sampled: vec![1, 99],
                backtrack: 3,
                ff_tokens: ff_tokens.to_vec(),
            }],
            wait: None,
        };
        let log_bytes = "printed\n".len();
        let message = "printed\ntimeout".to_owned();
        vec![
            Err(CallFailure::with_log(ErrorReason::TIMEOUT, message, log_bytes).unwrap()),
            Ok(Returned::Begun { prompt: None }),
            Ok(Returned::Begun {
                prompt: Some(vec![0, 99]),
            }),
            Ok(Returned::Pre {
                num_forks: 2,
                suspend: true,
                ff_tokens: vec![5],
                wait: waits
                    .read(Some(vec!["a".to_owned(), String::new()]))
                    .unwrap(),
            }),
            Ok(Returned::Mid(MidReturned::Stop)),
            Ok(Returned::Mid(MidReturned::Sample(None))),
            Ok(Returned::Mid(MidReturned::Sample(mask(42)))),
            Ok(Returned::Mid(MidReturned::Splice {
                backtrack: 1,
                ff_tokens: vec![9, 8],
            })),
            Ok(Returned::Post { stop: true }),
            Ok(Returned::Branches(vec![
                branch(shared.clone(), Some(0.5), &[1]),
                branch(shared, None, &[]),
                branch(None, None, &[2, 3]),
            ])),
        ]
    }

    #[test]
    fn every_outcome_is_read_back_and_no_part_of_one_is() {
        let group = Group::new(4, VariablesLimits::default());
        let member = group.enter().unwrap();
        let waits = Waits {
            member: &member,
            mark: group.mark(),
        };
        for result in every(&waits) {
            let report = StepReport {
                logs: "printed\n".to_owned(),
                storage: Vec::new(),
                micros: 70,
            };
            let outcome = Outcome { result, report };
            let message = write_outcome(&outcome);
            let body = &message[5..];
            let read = read_outcome(body, LIMITS, &waits).unwrap();
            assert_eq!(read.result, outcome.result);
            assert_eq!(read.report, outcome.report);
            for length in 0..body.len() {
                let part = read_outcome(&body[..length], LIMITS, &waits);
                assert!(part.is_none(), "{length}");
            }
            // Whatever a damaged one is read as, reading ends.
            for place in 0..body.len() {
                let mut damaged = body.to_vec();
                damaged[place] ^= 0xff;
                let _ = read_outcome(&damaged, LIMITS, &waits);
            }
        }
    }

    #[test]
    fn ai_742_outcomes_beyond_a_limit_are_not_read() {
        let group = Group::new(4, VariablesLimits::default());
        let member = group.enter().unwrap();
        let waits = Waits {
            member: &member,
            mark: group.mark(),
        };
        let read = |result| {
            let report = StepReport::default();
            let message = write_outcome(&Outcome { result, report });
            read_outcome(&message[5..], LIMITS, &waits)
        };
        let branch = |temperature| ReturnedBranch {
            mask: None,
            temperature,
            splices: Vec::new(),
            wait: None,
        };
        let branches = |count| vec![branch(None); count];
        assert!(read(Ok(Returned::Branches(branches(4)))).is_some());
        assert!(read(Ok(Returned::Branches(branches(5)))).is_none());
        let forks = |num_forks| Returned::Pre {
            num_forks,
            suspend: false,
            ff_tokens: Vec::new(),
            wait: None,
        };
        assert!(read(Ok(forks(4))).is_some() && read(Ok(forks(5))).is_none());
        let heat = |heat| read(Ok(Returned::Branches(vec![branch(Some(heat))])));
        assert!(heat(100.0).is_some());
        assert!(heat(100.1).is_none() && heat(f32::NAN).is_none());
        let mask = Some(Arc::new(Mask::all(101)));
        // The last word has bits for tokens that do not exist, which are cleared; one word more is none of ours.
        assert!(read(Ok(Returned::Mid(MidReturned::Sample(mask)))).is_some());
        let mask = Some(Arc::new(Mask::all(129)));
        assert!(read(Ok(Returned::Mid(MidReturned::Sample(mask)))).is_none());
        // Only a runtime says that.
        let lost = CallFailure::new(ErrorReason::RUNTIME_LOST, "");
        assert!(read(Err(lost)).is_none());
    }

    #[test]
    fn ai_742_outcomes_with_too_many_tokens_or_splices_are_not_read() {
        let group = Group::new(4, VariablesLimits::default());
        let member = group.enter().unwrap();
        let waits = Waits {
            member: &member,
            mark: group.mark(),
        };
        let read = |result| {
            let report = StepReport::default();
            let message = write_outcome(&Outcome { result, report });
            read_outcome(&message[5..], LIMITS, &waits)
        };
        let pre = |tokens| {
            let ff_tokens = vec![1; tokens];
            read(Ok(Returned::Pre {
                num_forks: 1,
                suspend: false,
                ff_tokens,
                wait: None,
            }))
        };
        assert!(pre(TOKENS_MAX).is_some() && pre(TOKENS_MAX + 1).is_none());
        let splice = |tokens| {
            let ff_tokens = vec![1; tokens];
            let backtrack = 0;
            read(Ok(Returned::Mid(MidReturned::Splice {
                backtrack,
                ff_tokens,
            })))
        };
        assert!(splice(TOKENS_MAX).is_some() && splice(TOKENS_MAX + 1).is_none());
        // Those of all branches count, in either list.
        let spliced = |splices, more| {
            let branch = ReturnedBranch {
                mask: None,
                temperature: None,
                splices: Vec::new(),
                wait: None,
            };
            let mut branches = vec![branch; 2];
            branches[0].splices = vec![
                ReturnedSplice {
                    when_sampled: vec![1],
                    backtrack: 0,
                    ff_tokens: vec![1],
                };
                splices
            ];
            branches[1].splices = vec![ReturnedSplice {
                when_sampled: Vec::new(),
                backtrack: 0,
                ff_tokens: vec![1; more],
            }];
            read(Ok(Returned::Branches(branches)))
        };
        let left = TOKENS_MAX - 2 * SPLICES_MAX;
        assert!(spliced(SPLICES_MAX, left).is_some());
        assert!(spliced(SPLICES_MAX, left + 1).is_none());
        assert!(spliced(SPLICES_MAX + 1, 0).is_none());
    }
}
