//! Models of LMTP servers, behind a Sapwood server.

use std::path::Path;

use rustix::process::Signal;

use crate::process::{Serving, folder, run};
use crate::server::with_echo;

/// A server of `parrot`, loaded.
fn parrot(name: &str) -> Serving {
    let mut back = Serving::start(&with_echo(name, ""), &[]);
    back.wait_for("loaded");
    back
}

/// What the model `parrot` makes of a prompt at the server at `url`.
fn asked(here: &Path, url: &str, prompt: &str) -> (i32, String) {
    let prompt = format!("prompt={prompt}");
    let call = ["run", "GENERATE", "--server", url, "--input", &prompt];
    let ended = run(here, &call);
    (ended.code, ended.out + &ended.err)
}

/// LM-951: with the tokenizer that the server itself has.
#[test]
fn lm_712_an_upstream_model_takes_text_like_a_local_one() {
    let back = parrot("lmtp-back");
    let here = folder("lmtp-front");
    // Beside one that is not there.
    let upstream = format!("lmtp://127.0.0.1:9,{}/parrot", back.address());
    let mut front = Serving::start(&here, &["--upstream", &upstream]);
    front.wait_for("joined an upstream");
    let reply = asked(&here, &front.url, "h\u{e4}lt es?");
    assert_eq!(reply, (0, "h\u{e4}lt es?".into()));
    // Whoever is a client of ours finds the file here, too.
    let files = [&front, &back].map(|server| server.get("/lmtp/tokenizer/parrot", ""));
    let [ours, theirs] = files.map(|file| file.split_once("\r\n\r\n").unwrap().1.to_owned());
    assert!(theirs.starts_with('{') && ours == theirs);
}

#[test]
fn lm_712_a_configured_tokenizer_must_exist_and_the_servers_own_is_used() {
    let back = parrot("lmtp-configured-back");
    let here = folder("lmtp-configured-front");
    let file = back.get("/lmtp/tokenizer/parrot", "");
    let file = file.split_once("\r\n\r\n").unwrap().1;
    // It reads, and is another.
    let one = "\"id\":257,";
    assert!(file.contains(one));
    std::fs::write(
        here.join("tokenizer.json"),
        file.replace(one, "\"id\":258,"),
    )
    .unwrap();
    let config = |peer: &str, tokenizer: &str| {
        let config = format!(
            "[[models]]\nname = \"parrot\"\nbackend = \"upstream\"\nupstream = {{ endpoints = [\"{peer}\"], tokenizer = \
             \"{}\" }}\n",
            here.join(tokenizer).display()
        );
        std::fs::write(here.join("sapwood.toml"), config).unwrap();
    };
    config(&back.address().to_string(), "nowhere.json");
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    let ended = run(&here, &serve);
    assert!(
        ended.code != 0 && ended.err.contains("nowhere.json"),
        "{ended:?}"
    );
    // What the server has itself is right, whatever was configured.
    config(&back.address().to_string(), "tokenizer.json");
    let mut front = Serving::start(&here, &[]);
    front.wait_for("joined an upstream");
    assert_eq!(asked(&here, &front.url, "x"), (0, "x".into()));
}

/// What stands beside the tokenizer is the model's as well: that shows that it was read.
#[test]
fn lm_712_the_address_of_a_model_names_its_tokenizer() {
    let back = parrot("lmtp-named-back");
    let here = folder("lmtp-named-front");
    let file = back.get("/lmtp/tokenizer/parrot", "");
    std::fs::create_dir(here.join("its files")).unwrap();
    let file = file.split_once("\r\n\r\n").unwrap().1;
    std::fs::write(here.join("its files/tokenizer.json"), file).unwrap();
    let template = "{% for message in messages %}<{{ message.content }}>{% endfor %}";
    std::fs::write(here.join("its files/chat_template.jinja"), template).unwrap();
    let upstream = |query: &str| format!("lmtp://{}/parrot?{query}", back.address());
    for (query, states) in [
        ("tokenizer=nowhere.json", "nowhere.json"),
        ("tokeniser=its", "'tokeniser'"),
    ] {
        let serve = ["serve", "--listen", "127.0.0.1:0", "--upstream"];
        let ended = run(&here, &[&serve[..], &[&upstream(query)]].concat());
        assert!(ended.code != 0 && ended.err.contains(states), "{ended:?}");
    }
    let named = format!("tokenizer={}/its%20files", here.display());
    let mut front = Serving::start(&here, &["--upstream", &upstream(&named)]);
    front.wait_for("joined an upstream");
    assert_eq!(asked(&here, &front.url, "x"), (0, "<x>".into()));
}

/// SIGHUP: servers come and go, and the one that serves them stays.
#[test]
fn lm_805_a_server_added_by_a_reload_replaces_another() {
    let (first, second) = (parrot("lmtp-first"), parrot("lmtp-second"));
    let here = folder("lmtp-pool");
    let names = |server: &Serving| {
        let config = format!(
            "[[models]]\nname = \"parrot\"\nbackend = \"upstream\"\nupstream = {{ endpoints = [\"{}\"] }}\n",
            server.address()
        );
        std::fs::write(here.join("sapwood.toml"), config).unwrap();
    };
    names(&first);
    let mut front = Serving::start(&here, &[]);
    front.wait_for("joined an upstream");
    assert_eq!(asked(&here, &front.url, "one"), (0, "one".into()));
    names(&second);
    front.signal(Signal::HUP);
    front.wait_for("an upstream joins a pool");
    front.wait_for("an upstream of a pool is available");
    drop(first);
    assert_eq!(asked(&here, &front.url, "two"), (0, "two".into()));
}
