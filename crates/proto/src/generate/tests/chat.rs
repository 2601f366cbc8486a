//! Inputs of conversations.

use super::sampling::asking;

/// TR-401: clients send empty values for fields that they do not use.
#[test]
fn tr_1306_tools_and_template_arguments_are_json_values_or_absent() {
    let tool = r#"[{"type":"function","function":{"name":"w"}}]"#;
    for (members, expect) in [
        (format!(r#""tools":{tool}"#), Some(tool)),
        (r#""tools":"x""#.to_owned(), Some("x")),
        (r#""tools":[]"#.to_owned(), None),
        (r#""tools":null"#.to_owned(), None),
        (r#""tools":" ""#.to_owned(), None),
    ] {
        let settings = asking(&members).unwrap();
        assert_eq!(settings.tools.as_deref(), expect, "{members}");
    }
    for (value, expect) in [
        (r#"{"a":[1]}"#, Ok(true)),
        (r#""{\"a\":1}""#, Ok(true)),
        ("{}", Ok(false)),
        (r#""""#, Ok(false)),
        ("null", Ok(false)),
        (
            "[1]",
            Err("parameter 'template_args' must be a JSON object, got [1]"),
        ),
        (
            r#""a""#,
            Err("parameter 'template_args' must be a JSON object, got a"),
        ),
    ] {
        let settings = asking(&format!(r#""template_args":{}"#, value));
        let written = settings.map(|settings| settings.template_args.is_some());
        assert_eq!(written, expect.map_err(str::to_owned), "{value}");
    }
    // Each row of a batch has a copy.
    let long = "x".repeat((1 << 20) + 1);
    for name in ["tools", "template_args", "suffix"] {
        let refused = asking(&format!(r#""{name}":"{long}""#)).unwrap_err();
        let expect = format!("{name}' must be at most 1048576 bytes, got 1048577 bytes");
        assert!(refused.contains(&expect), "{refused}");
    }
    let most = vec!["\"a\":1"; 10_001].join(",");
    assert!(
        asking(&format!(
            r#""template_args":"{{{}}}""#,
            most.replace('"', "\\\"")
        ))
        .is_err()
    );
}
