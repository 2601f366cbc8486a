//! Properties: order, repetition, cutting and renaming change no result (EV-202, EV-204, EV-211, EV-303, D-26).

use proptest::prelude::*;

use super::harness::*;
use crate::evergreen::{Chunk, Fragment, MetadataMode, NodeId, Payload};
use crate::session::SessionMachine;

/// A legal forest: leaves `l0..`, and trees `t0..` that list leaves and later trees only.
#[derive(Clone, Debug)]
struct Forest {
    leaves: Vec<String>,
    trees: Vec<Vec<usize>>,
}

fn forest() -> impl Strategy<Value = Forest> {
    let leaves = prop::collection::vec("[a-zé€ ]{0,12}", 1..5);
    let trees = prop::collection::vec(prop::collection::vec(0usize..8, 0..5), 1..4);
    (leaves, trees).prop_map(|(leaves, trees)| Forest { leaves, trees })
}

impl Forest {
    fn roots(&self) -> impl Iterator<Item = String> {
        (0..self.trees.len()).map(|at| format!("t{at}"))
    }

    /// Its fragments, leaves cut after each `every` bytes, trees after each `every` children.
    fn fragments(&self, every: usize) -> Vec<Fragment> {
        let mut all = Vec::new();
        for (at, text) in self.leaves.iter().enumerate() {
            let pieces: Vec<&[u8]> = if text.is_empty() {
                vec![b""]
            } else {
                text.as_bytes().chunks(every).collect()
            };
            let last = pieces.len() - 1;
            for (seq, piece) in pieces.into_iter().enumerate() {
                let payload = Some(Payload::Data(piece.to_vec().into()));
                let metadata = (seq == 0).then(|| of("text/plain", "USER").unwrap());
                let chunk = Some(Chunk { metadata, payload });
                let seq_on_wire = i32::try_from(seq).unwrap();
                all.push(Fragment {
                    chunk,
                    ..empty(&format!("l{at}"), seq_on_wire, seq == last)
                });
            }
        }
        for (at, children) in self.trees.iter().enumerate() {
            let name = |&child: &usize| {
                let later = self.trees.len() - at - 1;
                if child < later {
                    NodeId::from(format!("t{}", at + 1 + child))
                } else {
                    NodeId::from(format!("l{}", child % self.leaves.len()))
                }
            };
            let lists: Vec<&[usize]> = if children.is_empty() {
                vec![&[]]
            } else {
                children.chunks(every).collect()
            };
            let last = lists.len() - 1;
            for (seq, list) in lists.into_iter().enumerate() {
                let fragment = empty(&format!("t{at}"), i32::try_from(seq).unwrap(), seq == last);
                all.push(Fragment {
                    children: list.iter().map(name).collect(),
                    ..fragment
                });
            }
        }
        all
    }
}

/// The flattened content of every root.
fn contents(
    session: &mut SessionMachine,
    roots: impl Iterator<Item = String>,
) -> Vec<(Vec<Item>, Stop)> {
    roots.map(|root| content(session, &root)).collect()
}

fn shuffle<T>(list: &mut [T], seed: u64) {
    let mut state = seed | 1;
    for at in (1..list.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        list.swap(at, usize::try_from(state >> 33).unwrap() % (at + 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn ev_303_order_and_repetition_change_nothing(forest in forest(), every in 1usize..6, seed: u64, again in 0usize..10) {
        let straight = forest.fragments(every);
        let mut session = server();
        feed(&mut session, straight.clone()).unwrap();
        let expect = contents(&mut session, forest.roots());
        prop_assert!(expect.iter().all(|(_, stop)| *stop == Stop::End));

        let mut mixed = straight.clone();
        mixed.extend(straight.iter().cycle().take(again).cloned());
        shuffle(&mut mixed, seed);
        for mode_of in [MetadataMode::Strict, MetadataMode::Lenient, MetadataMode::PerChunk] {
            // Readers during arrival see a prefix and change nothing.
            let mut session = mode(mode_of);
            for (at, fragment) in mixed.iter().enumerate() {
                feed(&mut session, [fragment.clone()]).unwrap();
                if at % 3 == 0 {
                    let (early, _) = content(&mut session, "t0");
                    let whole = &expect[0].0;
                    let flat = |items: &[Item]| items.iter().flat_map(|item| item.data.clone()).collect::<Vec<u8>>();
                    prop_assert!(flat(whole).starts_with(&flat(&early)));
                }
            }
            prop_assert_eq!(contents(&mut session, forest.roots()), expect.clone());
        }
    }

    #[test]
    fn ev_211_cuts_mean_nothing(forest in forest(), one in 1usize..4, other in 4usize..20) {
        let read = |every| {
            let mut session = server();
            feed(&mut session, forest.fragments(every)).unwrap();
            contents(&mut session, forest.roots())
        };
        prop_assert_eq!(read(one), read(other));
    }

    #[test]
    fn ev_202_names_mean_nothing(forest in forest(), prefix in "[~/#.\u{0}-\u{7f}é]{0,20}") {
        let list = forest.fragments(3);
        let rename = |id: &NodeId| NodeId::from(format!("{prefix}{}", id.chars().rev().collect::<String>()));
        let renamed = list.iter().map(|fragment| Fragment {
            id: rename(&fragment.id),
            children: fragment.children.iter().map(rename).collect(),
            ..fragment.clone()
        });
        let (mut plain, mut strange) = (server(), server());
        feed(&mut strange, renamed).unwrap();
        feed(&mut plain, list.clone()).unwrap();
        let roots: Vec<String> = forest.roots().collect();
        let strange_roots: Vec<String> = roots.iter().map(|root| rename(&NodeId::from(root.as_str())).to_string()).collect();
        prop_assert_eq!(
            contents(&mut plain, roots.into_iter()),
            contents(&mut strange, strange_roots.into_iter())
        );
    }

    /// EV-201, EV-203, EV-209, EV-401
    #[test]
    fn ev_206_one_fault_gives_one_reason_in_every_order(forest in forest(), kind in 0usize..6, seed: u64) {
        let mut list = forest.fragments(2);
        let bad = match kind {
            0 => leaf("", 0, "x"),
            1 => leaf("l0", -1, "x"),
            2 => empty("l0", 1_000, false),
            3 => tree("new", 0, &["new"]),
            4 => chunk("new", 0, None, Some("x")),
            _ => Fragment { chunk: Some(Chunk { metadata: of("a/b", ""), payload: None }), ..tree("new", 0, &["l0"]) },
        };
        list.push(bad);
        let expect = feed(&mut server(), list.clone());
        prop_assert!(expect.is_err());
        shuffle(&mut list, seed);
        prop_assert_eq!(feed(&mut server(), list), expect);
    }

    /// All content that is written is read at the other side, however it is joined into messages.
    #[test]
    fn ev_706_what_one_side_writes_the_other_reads(
        pieces in prop::collection::vec((0usize..4, 0usize..3_000), 0..60), coalesce: bool, room in 1usize..5_000
    ) {
        let mut server = server_with(|config, limits| {
            config.coalesce = coalesce;
            limits.outbound_queue_bytes = room;
            limits.coalesce_bytes = 2_000;
        });
        let mut client = SessionMachine::new(crate::session::Side::Client, crate::session::Config::default(), T0);
        act(&mut server, action("f", "", "a=n0 b=n1 c=n2 d=n3")).unwrap();
        let start = start(&mut server);
        let text = of("text/plain", "").unwrap();
        let mut wrote = vec![Vec::new(); 4];
        for (at, (port, bytes)) in pieces.into_iter().enumerate() {
            let data = vec![u8::try_from(at).unwrap(); bytes];
            while server.nodes().write(start.outputs[port].1, &text, data.clone().into()).is_err() {
                let message = server.next_message(T0).expect("a full queue has something to send");
                client.handle(message, T0).unwrap();
            }
            wrote[port].extend(data);
        }
        server.calls().finish(start.action);
        while let Some(message) = server.next_message(T0) {
            client.handle(message, T0).unwrap();
        }
        for (port, expect) in wrote.into_iter().enumerate() {
            let (items, stop) = content(&mut client, &format!("n{port}"));
            prop_assert_eq!(stop, Stop::End);
            prop_assert_eq!(&items[0].data, &expect);
        }
    }
}
