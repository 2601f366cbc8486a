//! What becomes of a prompt: turns, modes, types of text, and a suffix.

use super::*;
use crate::node::Node;

fn leaf(role: &'static str, text: &str) -> Node {
    Chunk::text(text)
        .with_meta(Meta::default().with_role(role))
        .into()
}

fn end_of_turn() -> Node {
    Chunk::bytes(Bytes::new())
        .with_mime("application/x-protobuf; type=evergreen.v2.EndOfTurn")
        .into()
}

/// The prompt that the leaves of a tree become.
fn chat(parts: Vec<Node>) -> Result<(Vec<(String, String)>, bool)> {
    let prompting = block_on(prompt::read(
        "prompt",
        Node::tree(parts).read(),
        &PromptRoom::new(),
    ))?;
    let Prompt::Chat(chat) = prompting.chat(Value::Null, Value::Null)? else {
        panic!("a conversation");
    };
    let turns = chat
        .messages
        .into_iter()
        .map(|message| (message.role, message.content));
    Ok((turns.collect(), chat.continue_last))
}

/// EV-409: the consumer, here the model, decides what an empty role means.
#[test]
fn ev_605_leaves_are_grouped_into_turns_by_role() {
    let parts = vec![
        leaf("CONTEXT", "before"),
        leaf("developer", "be "),
        leaf("System", "kind"),
        leaf("", "a"),
        leaf("USER", "b"),
        leaf("Context", "later"),
        leaf("model", "c"),
        leaf("FUNCTION", "d"),
        leaf("Narrator", "e"),
    ];
    let (turns, continued) = chat(parts).unwrap();
    let expect = [
        ("system", "before"),
        ("system", "be kind"),
        ("user", "ab"),
        ("user", "later"),
        ("assistant", "c"),
        ("tool", "d"),
        ("Narrator", "e"),
    ];
    assert_eq!(
        turns,
        expect.map(|(role, text)| (role.to_owned(), text.to_owned()))
    );
    assert!(!continued);
}

#[test]
fn ev_606_an_end_of_turn_closes_the_turn() {
    let cases: [(Vec<Node>, usize, bool); 4] = [
        (
            vec![leaf("USER", "a"), end_of_turn(), leaf("USER", "b")],
            2,
            false,
        ),
        (vec![leaf("USER", "a"), leaf("ASSISTANT", "b")], 2, true),
        (
            vec![leaf("USER", "a"), leaf("ASSISTANT", "b"), end_of_turn()],
            2,
            false,
        ),
        (
            vec![
                end_of_turn(),
                leaf("USER", "a"),
                end_of_turn(),
                end_of_turn(),
            ],
            1,
            false,
        ),
    ];
    for (parts, turns, continued) in cases {
        let (got, continues) = chat(parts).unwrap();
        assert_eq!((got.len(), continues), (turns, continued));
    }
}

/// The output of an action, and how it ended.
fn answer(text: &str, end: ChoiceFinish) -> Node {
    let begun = Chunk::text(text).with_meta(Meta::default().with_role("ASSISTANT"));
    let ended = Chunk::empty().with_mime(Mime::TEXT);
    let ended = ended.with_meta(Meta::default().with_finish(0, end));
    Node::new(futures::stream::iter([Ok(begun), Ok(ended)]))
}

/// The parts of a prompt, the turns that they become, and whether the last one is continued.
type Conversation = (Vec<Node>, &'static [(&'static str, &'static str)], bool);

fn conversations() -> Vec<Conversation> {
    use ChoiceFinish::{Cancelled, Length, Stop, ToolCalls};
    let (user, ours) = (|text| leaf("USER", text), |text| leaf("ASSISTANT", text));
    vec![
        (vec![answer("a", Stop)], &[("user", "a")], false),
        (vec![answer("a", Length)], &[("user", "a")], false),
        (vec![ours("a")], &[("user", "a")], false),
        (
            vec![leaf("SYSTEM", "s"), answer("a", Stop), answer("b", Stop)],
            &[("system", "s"), ("user", "ab")],
            false,
        ),
        (
            vec![user("q"), answer("a", Stop)],
            &[("user", "q"), ("assistant", "a")],
            false,
        ),
        (
            vec![user("q"), answer("a", Length)],
            &[("user", "q"), ("assistant", "a")],
            true,
        ),
        (
            vec![user("q"), answer("a", Cancelled)],
            &[("user", "q"), ("assistant", "a")],
            false,
        ),
        (
            vec![user("q"), answer("a", ToolCalls)],
            &[("user", "q"), ("assistant", "a")],
            false,
        ),
        (
            vec![user("q"), ours("a")],
            &[("user", "q"), ("assistant", "a")],
            true,
        ),
        (
            vec![user("q"), answer("a", Length), ours("b")],
            &[("user", "q"), ("assistant", "ab")],
            true,
        ),
        (
            vec![user("q"), answer("a", Stop), ours("b")],
            &[("user", "q"), ("assistant", "a"), ("assistant", "b")],
            true,
        ),
        (
            vec![answer("a", Stop), user("q")],
            &[("assistant", "a"), ("user", "q")],
            false,
        ),
        (
            vec![user("q"), answer("a", Length), end_of_turn()],
            &[("user", "q"), ("assistant", "a")],
            false,
        ),
        (
            vec![answer("a", Stop), end_of_turn(), answer("b", Stop)],
            &[("user", "a"), ("user", "b")],
            false,
        ),
    ]
}

#[test]
fn d_51_answers_of_actions_are_closed_and_a_prompt_without_a_user_is_the_users() {
    for (at, (parts, expect, continues)) in conversations().into_iter().enumerate() {
        let (turns, continued) = chat(parts).unwrap();
        let turns: Vec<(&str, &str)> = turns.iter().map(|(a, b)| (&**a, &**b)).collect();
        assert_eq!(
            (turns.as_slice(), continued),
            (expect, continues),
            "case {at}"
        );
    }
}

/// The first example of the README: an answer is the prompt of another call.
#[test]
fn d_51_an_earlier_answer_alone_is_the_question_of_a_prompt() {
    let echo = kernel(json!({"script": "echo"}));
    let first = echo.node("m", args! { prompt: "What is a tree?" });
    let second = whole(echo.run::<String>("m", args! { prompt: first })).unwrap();
    assert_eq!(second, "What is a tree?");
}

#[test]
fn ev_607_prompt_modes_auto_chat_and_raw() {
    let echo = kernel(json!({"script": "echo"}));
    let text = |node: Node, mode: &str| {
        whole(echo.run::<String>(
            "m",
            args! { prompt: node, config: json!({"prompt_mode": mode}) },
        ))
    };
    assert_eq!(text(leaf("USER", "hi"), "auto").unwrap(), "hi");
    assert_eq!(
        text(
            Node::tree([leaf("USER", "a"), end_of_turn(), leaf("USER", "b")]),
            "raw"
        )
        .unwrap(),
        "ab"
    );
    let tokens = |data: &'static [u8]| {
        Node::from(Chunk::bytes(data).with_mime("application/x-sapwood-tokens"))
    };
    assert_eq!(
        text(Node::tree([tokens(b"\x68\0\0\0"), leaf("", "i")]), "raw").unwrap(),
        "hi"
    );
    let reason = |result: Result<String>| result.unwrap_err().reason().to_owned();
    assert_eq!(reason(text(tokens(b"abc"), "raw")), "BAD_TOKENS");
    assert_eq!(reason(text(tokens(b"\0\0\0\x7f"), "raw")), "BAD_TOKENS");
    assert_eq!(
        reason(text(tokens(b"\x68\0\0\0"), "chat")),
        "UNSUPPORTED_MIMETYPE"
    );
    let plain = kernel(json!({"script": "text", "text": "x", "chat": false}));
    assert_eq!(
        whole(run(&plain, json!({}))).unwrap(),
        "x",
        "auto is raw without a template"
    );
    let refused = whole(run(&plain, json!({"prompt_mode": "chat"}))).unwrap_err();
    assert_eq!(
        (refused.code().name(), refused.reason()),
        ("failed-precondition", "NO_TEMPLATE")
    );
}

#[test]
fn ev_608_mimetypes_that_are_taken_as_text() {
    let node =
        |mime: &'static str, data: &'static [u8]| Node::from(Chunk::bytes(data).with_mime(mime));
    for (mime, data, expect) in [
        ("text/markdown", &b"a"[..], ""),
        ("application/json", b"a", ""),
        ("application/xml", b"a", ""),
        ("application/x-latex", b"a", ""),
        ("image/svg+xml", b"a", ""),
        ("text/plain; charset=UTF-8", b"a", ""),
        ("text/plain; charset=us-ascii", b"a", ""),
        ("application/octet-stream", b"", ""),
        ("text/plain; charset=latin1", b"a", "UNSUPPORTED_MIMETYPE"),
        ("text/plain", b"\xff", "BAD_TEXT"),
        ("image/png", b"a", "UNSUPPORTED_MIMETYPE"),
        ("application/octet-stream", b"a", "UNSUPPORTED_MIMETYPE"),
    ] {
        let read = chat(vec![leaf("USER", "x"), node(mime, data)]);
        assert_eq!(
            read.as_ref().map_or_else(Error::reason, |_| ""),
            expect,
            "{mime}"
        );
    }
    let named = Chunk::bytes(&b"a"[..])
        .with_mime("image/png")
        .with_meta(Meta::default().with_extra("node", "n7"));
    let error = chat(vec![named.into()]).unwrap_err().to_string();
    assert!(
        error.contains("image/png") && error.contains("n7"),
        "{error}"
    );
}

/// Text split inside a character is joined before it is checked. Limit: `prompt_bytes`.
#[test]
fn ev_608_pieces_of_a_leaf_are_joined_before_they_are_checked() {
    let cut =
        [&b"caf\xc3"[..], b"\xa9"].map(|piece| Ok(Chunk::bytes(piece).with_mime("text/plain")));
    let (turns, _) = chat(vec![Node::new(futures::stream::iter(cut))]).unwrap();
    assert_eq!(turns[0].1, "caf\u{e9}");
    let long = |bytes: usize| vec![Node::from("x".repeat(bytes))];
    assert!(chat(long(limits::PROMPT_BYTES)).is_ok());
    let over = chat(long(limits::PROMPT_BYTES + 1));
    assert!(matches!(
        over,
        Err(Error::Limit {
            name: "prompt_bytes",
            ..
        })
    ));
}

/// The prompt and the suffix as a model with tokens for it gets them, in a model with a chat template.
#[test]
fn a_suffix_makes_the_prompt_the_text_before_a_place_to_fill_in() {
    let kernel = kernel(json!({"infill": true}));
    let run = |args| {
        let (text, meta) = block_on(kernel.run::<String>("m", args).finish())?;
        Ok::<_, Error>((text, meta.usage.prompt_tokens))
    };
    // BOS and three tokens around the texts, which the script repeats.
    assert_eq!(
        run(args! { prompt: "ab", suffix: "cd" }).unwrap(),
        ("abcd".into(), 8)
    );
    let two = Node::tree([leaf("USER", "a"), leaf("", "b"), end_of_turn()]);
    assert_eq!(
        run(args! { prompt: two, suffix: "c" }).unwrap(),
        ("abc".into(), 7)
    );
    let raw = json!({"prompt_mode": "raw"});
    let mixed = args! { prompt: "", suffix: "<fim_middle>", config: raw };
    assert_eq!(run(mixed).unwrap(), ("<fim_middle>".into(), 16));
    // An empty one is none: a client may have bound it all the same.
    let raw = json!({"prompt_mode": "raw"});
    assert_eq!(
        run(args! { prompt: "ab", suffix: "", config: raw })
            .unwrap()
            .1,
        3
    );
    let messages = json!([{"role": "user", "content": "x"}]);
    let chat = json!({"prompt_mode": "chat"});
    let ids = || Chunk::bytes(&[1, 0, 0, 0][..]).with_mime(Mime::TOKENS);
    for (args, name, reason) in [
        (
            args! { messages: messages, suffix: "b" },
            "suffix",
            "BAD_CONFIG",
        ),
        (
            args! { prompt: "a", suffix: "b", config: chat },
            "suffix",
            "BAD_CONFIG",
        ),
        (args! { prompt: ids(), suffix: "b" }, "prompt", "BAD_TOKENS"),
        (args! { prompt: "a", suffix: ids() }, "suffix", "BAD_TOKENS"),
        (args! { suffix: "b" }, "prompt", "MISSING_INPUT"),
    ] {
        let error = run(args).unwrap_err();
        assert!(
            matches!(&error, Error::Argument { name: of, .. } if **of == *name),
            "{error:?}"
        );
        assert_eq!(error.reason(), reason, "{error:?}");
    }
    let error = run(args! { prompt: "a", suffix: Chunk::bytes(&b"x"[..]).with_mime("image/png") });
    assert!(error.unwrap_err().to_string().contains("suffix"));
    let without = states("Hello");
    let error = whole(without.run::<String>("m", args! { prompt: "a", suffix: "b" })).unwrap_err();
    assert_eq!(
        (error.code().name(), error.reason()),
        ("invalid-request", "NO_INFILL")
    );
}

#[test]
fn ke_137_a_prompt_and_its_suffix_are_read_together() {
    let kernel = kernel(json!({"infill": true}));
    for prompt_first in [true, false] {
        let (prompt, prompt_node) = Node::channel(1);
        let (suffix, suffix_node) = Node::channel(1);
        let (mut first, mut second) = if prompt_first {
            (prompt, suffix)
        } else {
            (suffix, prompt)
        };
        let feed = async {
            for writer in [&mut first, &mut second] {
                for _ in 0..3 {
                    writer.send(Chunk::text("x")).await.unwrap();
                }
            }
            second.finish();
            first.finish();
        };
        let args = args! { prompt: prompt_node, suffix: suffix_node };
        let run = kernel.run::<String>("m", args).finish();
        let (finished, ()) = block_on(futures::future::join(run, feed));
        assert_eq!(finished.unwrap().0, "xxxxxx");
    }
}

#[test]
fn a_suffix_that_is_null_is_none_and_one_that_nothing_can_use_is_refused() {
    let filler = kernel(json!({"infill": true}));
    let raw = || json!({"prompt_mode": "raw"});
    let args = args! { prompt: "ab", suffix: Value::Null, config: raw() };
    let text = whole(filler.run::<String>("m", args)).unwrap();
    assert_eq!(text, "ab");
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let printed = json!({"template_args": {"a": 1}});
    for args in [
        args! { prompt: "a", suffix: "b", tools: tool },
        args! { prompt: "a", suffix: "b", config: printed },
    ] {
        let error = whole(filler.run::<String>("m", args)).unwrap_err();
        assert_eq!(error.reason(), "BAD_CONFIG", "{error:?}");
    }
    let none = args! { prompt: "a", suffix: "b", tools: json!([]) };
    assert!(whole(filler.run::<String>("m", none)).is_ok());
    // Refused while the prompt is still being written.
    let plain = kernel(json!({}));
    let (_writer, prompt) = Node::channel(1);
    let args = args! { prompt: prompt, suffix: "b" };
    let error = whole(plain.run::<String>("m", args)).unwrap_err();
    assert_eq!(error.reason(), "NO_INFILL");
    // Each of them fits, and both together do not.
    let half = limits::PROMPT_BYTES / 2 + 1;
    let long = || Chunk::text("x".repeat(half));
    let args = args! { prompt: long(), suffix: long() };
    let error = whole(filler.run::<String>("m", args)).unwrap_err();
    assert!(
        matches!(&error, Error::Limit { name, .. } if *name == "prompt_bytes"),
        "{error:?}"
    );
}

#[test]
fn exactly_one_of_prompt_and_messages_is_required() {
    let echo = kernel(json!({"script": "echo"}));
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "m"}]}]);
    assert_eq!(
        whole(echo.run::<String>("m", args! { messages: messages.clone() })).unwrap(),
        "m"
    );
    let none = whole(echo.run::<String>("m", ())).unwrap_err();
    assert_eq!(none.reason(), "MISSING_INPUT");
    let both =
        whole(echo.run::<String>("m", args! { prompt: "a", messages: messages })).unwrap_err();
    assert_eq!(both.reason(), "DUPLICATE_PARAM");
    for bad in [
        json!({}),
        json!([1]),
        json!([{"content": "x"}]),
        json!([{"role": "user", "content": 1}]),
    ] {
        assert!(matches!(
            whole(echo.run::<String>("m", args! { messages: bad })),
            Err(Error::Argument { .. })
        ));
    }
    for bad in [json!({}), json!([{"name": "f"}]), json!("[")] {
        assert!(matches!(
            whole(echo.run::<String>("m", args! { prompt: "x", tools: bad })),
            Err(Error::Argument { .. })
        ));
    }
}
