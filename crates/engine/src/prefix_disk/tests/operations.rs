//! Any order of calls and faults.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Operation {
    Offer(u64, Vec<Token>),
    Read(u64, Vec<Token>),
    Settle,
    Restart,
    GoWrong(u8),
    Damage(u8),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let text = || prop::collection::vec(0_u32..3, 1..12);
    let one = prop_oneof![
        6 => (0_u64..2, text()).prop_map(|(scope, text)| Operation::Offer(scope, text)),
        6 => (0_u64..2, text()).prop_map(|(scope, text)| Operation::Read(scope, text)),
        2 => Just(Operation::Settle),
        1 => Just(Operation::Restart),
        1 => (0_u8..5).prop_map(Operation::GoWrong),
        1 => any::<u8>().prop_map(Operation::Damage),
    ];
    prop::collection::vec(one, 1..60)
}

fn faults(number: u8) -> DiskFaults {
    let none = DiskFaults::default();
    match number {
        0 => DiskFaults {
            reads_fail: true,
            ..none
        },
        1 => DiskFaults {
            cut_at: Some(60),
            ..none
        },
        2 => DiskFaults {
            room: Some(20_000),
            ..none
        },
        3 => DiskFaults {
            opens_fail: true,
            ..none
        },
        _ => none,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens: what arrives is what was saved for its scope and tokens, of the prompt that asked; the files stay
    /// within the limit; and every read ends.
    #[test]
    fn what_is_read_was_saved_and_the_limit_holds(
        partial in any::<bool>(),
        operations in operations(),
    ) {
        let disk = Arc::<VirtualDisk>::default();
        let terms = DiskTerms { partial, limit: 40_000, ..terms() };
        let mut bench = Bench::new(&disk, terms.clone());
        for operation in operations {
            match operation {
                Operation::Offer(scope, text) => bench.offer(PREFIX, scope, &text),
                Operation::Read(scope, text) => {
                    if let Some(read) = bench.read(PREFIX, scope, &text) {
                        prop_assert_eq!(read[0], text[0]);
                        prop_assert!(partial || text.starts_with(&read));
                    }
                }
                Operation::Settle => {
                    for SavedEntry { scope, prefix, .. } in bench.settle() {
                        let whole = prefix.state.whole().unwrap();
                        prop_assert_eq!(&*whole, &state(scope, &prefix.tokens));
                    }
                }
                Operation::Restart => {
                    drop(bench);
                    bench = Bench::new(&disk, terms.clone());
                }
                Operation::GoWrong(number) => disk.set(faults(number)),
                Operation::Damage(at) => disk.each(|_, bytes| {
                    let at = at as usize * 3 % bytes.len();
                    bytes[at] ^= 0x10;
                }),
            }
            prop_assert!(disk.bytes() <= terms.limit);
        }
        bench.settle();
        prop_assert_eq!((bench.tier.writes.is_done(), bench.tier.reads.is_empty()), (true, true));
        prop_assert_eq!(bench.tier.queued_bytes(), 0);
    }
}
