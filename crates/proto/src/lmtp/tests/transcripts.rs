//! The transcripts of the specification, byte for byte.

use super::*;
use crate::steer::Token;

fn transcript(name: &str) -> String {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/lmtp");
    std::fs::read_to_string(folder.join(name)).unwrap()
}

fn play(name: &str, mut server: Server, end: &str) {
    let text = transcript(name);
    let mut step = Vec::new();
    let mut reply = Vec::new();
    for line in text.lines() {
        let (mark, rest) = line.split_at(1);
        let rest = rest.trim_start();
        if mark != "=" && !step.is_empty() {
            reply.extend(server.step(std::mem::take(&mut step)));
        }
        match mark {
            ">" => {
                assert!(reply.is_empty(), "{name}: not expected: {reply:?}");
                server.send(rest);
                reply.extend(server.received());
            }
            "=" => step.push(given(&server, rest)),
            "<" => {
                assert!(!reply.is_empty(), "{name}: expected {rest}");
                assert_eq!(reply.remove(0), format!("{rest}{end}"), "{name}");
            }
            _ => {}
        }
    }
    assert!(reply.is_empty(), "{name}: not expected: {reply:?}");
}

fn given(server: &Server, line: &str) -> (StreamKey, StreamPiece) {
    let mut words = line.split(' ');
    let mut word = || words.next();
    let id = word().unwrap();
    let mut live = server.started.iter().map(|start| start.stream);
    let is_named = |stream: &StreamKey| {
        let live = server.session.id(*stream);
        live.is_some_and(|live| live.as_json() == id)
    };
    let stream = live.rfind(is_named).unwrap();
    let token = word().unwrap().parse().unwrap();
    let logprob = word().unwrap().parse().unwrap();
    let finish = word()
        .filter(|word| *word != "-")
        .map(StreamFinish::from_name);
    let top = words.map(|pair| {
        let (id, value) = pair.split_once(':').unwrap();
        (id.parse::<Token>().unwrap(), value.parse::<f32>().unwrap())
    });
    let item = TokenItem {
        token,
        logprob,
        finish,
        top: top.collect(),
        ..TokenItem::default()
    };
    (stream, StreamPiece::Item(item))
}

/// LM-401, LM-402, LM-404, LM-406, LM-311, LM-331: the example of the specification, byte for byte.
#[test]
fn lm_208_the_transcripts_are_sent_byte_for_byte() {
    for name in ["base.txt", "refused.txt"] {
        play(name, Server::new(), "");
    }
}

#[test]
fn lm_101_the_transcripts_are_the_same_on_lines() {
    for name in ["base.txt", "refused.txt"] {
        play(name, Server::lines(), "\n");
    }
}

#[test]
fn lm_101_one_line_is_ended_by_one_byte() {
    let mut frames = Server::new();
    let mut lines = Server::lines();
    let text = r#"MODEL_INFO {"stream_id":4,"model":"x"}"#;
    let (framed, lined) = (frames.ask(text), lines.ask(text));
    assert!(framed.starts_with(r#"MSG [{"stream_id":4,"#) && framed.ends_with("}]"));
    assert_eq!(lined, framed + "\n");
}

/// The bytes of section 1: the contents of a frame and of a line.
#[test]
fn lm_101_frames_and_lines_hold_the_same_bytes() {
    let line =
        b"\x4d\x53\x47\x20\x5b\x7b\x22\x73\x74\x72\x65\x61\x6d\x5f\x69\x64\x22\x3a\x34\x7d\x5d\x0a";
    let mut lines = LineSplitter::new(21);
    lines.push(line);
    let text = "MSG [{\"stream_id\":4}]";
    assert_eq!(lines.next_line(), Some(WireLine::Text(text.into())));

    let masked = [0x59, 0x48, 0x43, 0x5f, 0x4f, 0x2b, 0x77, 0x70_u8];
    let mask = [0x0a, 0x0b, 0x0c, 0x0d];
    let bytes = masked.iter().zip(mask.iter().cycle());
    let text: Vec<u8> = bytes.map(|(byte, mask)| byte ^ mask).collect();
    assert_eq!(text, b"SCORE {}");
    let answer = Server::new().ask(std::str::from_utf8(&text).unwrap());
    assert!(answer.ends_with(r#""error":"'stream_id'","code":"missing_required_parameter"}]"#));
}
