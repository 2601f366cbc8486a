//! D-48: equal text with a cold cache and with prefixes that come from the disk, for each kind of model.

use std::sync::Arc;

use super::reuse::{Bench, generated, kinds, text};
use super::*;
use crate::Config;
use crate::prefix_disk::virtual_disk::VirtualDisk;

/// A prompt, asked again, with another end, and in the next turn.
fn prompts(of: u32, reply: &[Token]) -> [Vec<Token>; 3] {
    let prompt = text(of, 150);
    [
        prompt.clone(),
        [text(of, 120), text(of + 50, 20)].concat(),
        [prompt, reply.to_vec(), text(of + 70, 15)].concat(),
    ]
}

#[test]
fn d_48_prefixes_of_the_disk_give_equal_text() {
    for of in kinds() {
        let kind = of.name;
        // Others restore whole prefixes alone, or have large states, which may take longer to read than to compute.
        let full = of.attends_to_all();
        let options = of.options(&options());
        let new = || Bench::with(&of.shape, &options, Config::default());
        let disk = Arc::<VirtualDisk>::default();
        let over_disk = || {
            let mut bench = new();
            bench.owner.open_disk(Arc::clone(&disk) as _);
            bench
        };
        let mut first = over_disk();
        let replies: Vec<Vec<Token>> = (1..4)
            .map(|of| {
                let answer = first.answers(vec![generated(&text(of, 150), 30, 1)]);
                answer[0].choices[0].iter().map(|token| token.0).collect()
            })
            .collect();
        // Out of the cells and the memory of a process, and then over its end.
        first.owner.move_to_disk();
        for restarted in [false, true] {
            let mut warm = match restarted {
                true => over_disk(),
                false => std::mem::replace(&mut first, new()),
            };
            for (of, reply) in (1..).zip(&replies) {
                let mut cached = Vec::new();
                for prompt in prompts(of, reply) {
                    let what = format!("{kind} {restarted} {of} {}", prompt.len());
                    let request = || vec![generated(&prompt, 20, 1)];
                    let answer = warm.answers(request()).remove(0);
                    let alone = new().answers(request()).remove(0);
                    assert_eq!(alone.cached, 0);
                    answer.assert_as(&alone, warm.equality, &what);
                    cached.push(answer.cached);
                }
                assert!(cached[2] >= 148, "{kind} {restarted}: {cached:?}");
            }
            let stats = warm.engine.stats();
            assert!(!full || stats.prefix_disk_read_bytes.get() > 0, "{kind}");
            assert_eq!(stats.prefix_disk_failures.get(), 0, "{kind}");
            warm.owner.close_disk();
        }
    }
}
