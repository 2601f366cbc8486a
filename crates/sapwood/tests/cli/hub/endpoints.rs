//! Which server is asked, through what, and what it is told.

use super::*;

#[test]
fn the_token_is_sent_to_the_hub_and_not_to_where_it_redirects() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-token", &hub.hub);
    let file = user.here.join("token");
    std::fs::write(&file, "hf_of_file\n").unwrap();
    for (variables, token) in [
        (vec![("HF_TOKEN", "hf_hush")], "hf_hush"),
        (
            vec![("HF_TOKEN_PATH", file.to_str().unwrap())],
            "hf_of_file",
        ),
        (vec![("HF_HOME", user.here.to_str().unwrap())], "hf_of_file"),
        (
            vec![("HF_TOKEN", "hf_hush"), ("SAPWOOD_HUB__TOKEN", "ours")],
            "ours",
        ),
    ] {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command.envs(variables);
        let seen = hub.hub.requests().len();
        let pulled = run_with(command, "");
        ok(&pulled);
        assert!(!format!("{pulled:?}").contains(token));
        for request in &hub.hub.requests()[seen..] {
            assert_eq!(request.headers["authorization"], format!("Bearer {token}"));
        }
        ok(&user.run(&["rm", "hf:o/r"]));
    }
    assert_eq!(hub.cdn.requests().len(), 4);
    for request in hub.cdn.requests() {
        assert_eq!(request.headers.get("authorization"), None);
    }
}

/// A file that lies in the working directory may have come with somebody else's project.
#[test]
fn an_endpoint_of_a_file_that_was_found_gets_no_token_but_its_own() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-found", &hub.hub);
    std::fs::write(user.here.join("token"), "hf_of_login\n").unwrap();
    let file = user.here.join("sapwood.toml");
    let endpoint = format!("[hub]\nendpoint = \"{}\"\n", hub.hub.url);
    let with_token = format!("{endpoint}token = \" its \"\n");
    for (text, arguments, variable, token) in [
        (&endpoint, &[][..], "HF_TOKEN", None),
        (&endpoint, &[], "SAPWOOD_HUB__TOKEN", None),
        (&endpoint, &[], "NONE", None),
        (&with_token, &[], "HF_TOKEN", Some("Bearer its")),
        (
            &endpoint,
            &["--config", "sapwood.toml"],
            "HF_TOKEN",
            Some("Bearer hush"),
        ),
        (
            &endpoint,
            &["--config", "sapwood.toml"],
            "NONE",
            Some("Bearer hf_of_login"),
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let seen = hub.hub.requests().len();
        let mut command = sapwood(
            &user.here,
            &[arguments, &["models", "pull", "hf:o/r"]].concat(),
        );
        command
            .env("SAPWOOD_HUB__DIR", user.models())
            .env("HF_HOME", &user.here)
            .env(variable, " hush\n");
        ok(&run_with(command, ""));
        let requests = hub.hub.requests();
        assert!(requests.len() > seen);
        for request in &requests[seen..] {
            let sent = request.headers.get("authorization").map(String::as_str);
            assert_eq!(sent, token, "{text} {arguments:?} {variable}");
        }
    }
}

#[test]
fn a_wrong_endpoint_matters_only_to_what_needs_it() {
    let hub = FakeHub::new(&usual());
    let mut user = User::new("hub-wrong", &hub.hub);
    user.endpoint = "mirror.example".into();
    ok(&user.run(&["list"]));
    let pulled = user.run(&["pull", "hf:o/r"]);
    assert_eq!(pulled.code, 2, "{pulled:?}");
    assert!(pulled.err.contains("HF_ENDPOINT"), "{pulled:?}");
    let mut command = user.command(&["list"]);
    command.env("SAPWOOD_HUB__STALL_TIMEOUT", "1000000years");
    let refused = run_with(command, "");
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.err.contains("hub.stall_timeout"), "{refused:?}");
}

#[test]
fn nothing_is_downloaded_offline() {
    let hub = FakeHub::new(&usual());
    let user = User::new("hub-offline", &hub.hub);
    for variable in ["HF_HUB_OFFLINE", "SAPWOOD_HUB__OFFLINE"] {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command.env(
            variable,
            if variable.starts_with("HF") {
                "1"
            } else {
                "true"
            },
        );
        fails(&run_with(command, ""), &["hf:o/r is not in", "hub.offline"]);
    }
    assert_eq!(hub.hub.requests().len(), 0);
    let mut command = user.command(&["pull", "hf:o/r"]);
    // Nothing listens at port 9, which is reserved for `discard`.
    command
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("SAPWOOD_HUB__RETRIES", "1");
    fails(
        &run_with(command, ""),
        &["127.0.0.1:9 does not answer", "HF_ENDPOINT"],
    );
}

/// Nothing but the proxy knows where `hub.test` and `cdn.test` are.
#[test]
fn a_model_is_pulled_through_the_proxy_of_the_environment() {
    let proxy = HttpServer::start(|request| {
        let file = format!("http://hub.test/o/r/resolve/{COMMIT}/{Q4}");
        match request.path.as_str() {
            "http://hub.test/api/models/o/r/revision/main?blobs=true" => {
                Reply::new(200, listing(&[(Q4.to_owned(), gguf(SIZE))]).to_string())
            }
            path if path == file => Reply::new(302, "").header("location", "http://cdn.test/x"),
            "http://cdn.test/x" => Reply::new(200, gguf(SIZE)),
            _ => Reply::new(407, ""),
        }
    });
    let mut user = User::new("hub-proxy", &proxy);
    let address = proxy.url.replace("http://", "http://me:hush@");
    let pull = |user: &User, variables: &[(&str, &str)]| {
        let mut command = user.command(&["pull", "hf:o/r"]);
        command
            .envs(variables.iter().copied())
            .env("SAPWOOD_HUB__RETRIES", "0");
        let pulled = run_with(command, "");
        assert!(!format!("{pulled:?}").contains("hush"), "{pulled:?}");
        pulled
    };
    user.endpoint = "http://hub.test".to_owned();
    for variable in ["http_proxy", "HTTP_PROXY", "ALL_PROXY"] {
        ok(&pull(&user, &[(variable, &address)]));
        assert_eq!(std::fs::read(user.file(Q4)).unwrap(), gguf(SIZE));
        ok(&user.run(&["rm", "hf:o/r"]));
    }
    let requests = proxy.requests();
    assert_eq!(requests.len(), 9);
    for request in requests {
        assert_eq!(request.headers["proxy-authorization"], "Basic bWU6aHVzaA==");
    }
    user.endpoint = "http://other.test".to_owned();
    fails(
        &pull(&user, &[("HTTP_PROXY", &address)]),
        &["does not connect to other.test (407)", "USER:PASSWORD@"],
    );
    // Nothing listens at port 9, which is reserved for `discard`.
    user.endpoint = "http://127.0.0.1:9".to_owned();
    let direct = [("HTTP_PROXY", &*address), ("NO_PROXY", "127.0.0.1")];
    fails(&pull(&user, &direct), &[": 127.0.0.1:9 does not answer"]);
    let wrong = [("HTTP_PROXY", "http://me:p@hush@p:1")];
    fails(&pull(&user, &wrong), &[": 127.0.0.1:9 does not answer"]);
    user.endpoint = "http://hub.test".to_owned();
    let wrong = pull(&user, &wrong);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(
        wrong.err.contains("see HTTPS_PROXY, HTTP_PROXY"),
        "{wrong:?}"
    );
}

#[test]
fn a_mirror_below_a_path_and_a_revision_are_asked_for() {
    let hub = HttpServer::start(|request| match request.path.as_str() {
        "/mirror/api/models/o/r/revision/refs%2Fpr%2F3?blobs=true" => {
            Reply::new(200, listing(&[(Q4.to_owned(), gguf(100))]).to_string())
        }
        path if path == format!("/mirror/o/r/resolve/{COMMIT}/{Q4}") => Reply::new(200, gguf(100)),
        path => panic!("{path}"),
    });
    let mut user = User::new("hub-mirror", &hub);
    user.endpoint += "/mirror";
    ok(&user.run(&["pull", "hf:o/r@refs/pr/3"]));
    let name = format!("hf:o/r@refs/pr/3:{Q4}");
    assert_eq!(user.names(), [&*name]);
    ok(&user.run(&["rm", &name]));
}
